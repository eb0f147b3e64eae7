"""Every loss and optimizer over several steps, against torch.optim and autograd in float64."""

import copy
from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import eager
from edgetailor import TrainingConfig, split
from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn
from parameters import half_quick, some_long
from refusals import refused
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import Loss, Optimizer

RATE, MOMENTUM, DECAY = 0.05, 0.8, 0.1
STEPS = 5
SAMPLES = 6
CLOSE = {"rtol": 1e-9, "atol": 1e-11}

Steps = Callable[..., torch.optim.Optimizer]
BUILT: dict[Optimizer, Steps] = {
    "sgd": partial(torch.optim.SGD, momentum=MOMENTUM),
    "nesterov": partial(torch.optim.SGD, momentum=MOMENTUM, nesterov=True),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def config(**settings: object) -> TrainingConfig:
    return TrainingConfig(
        learning_rate=RATE,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        **settings,  # type: ignore[arg-type]
    )


def draw(loss: Loss, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, *INPUT_SHAPE, generator=generator, dtype=torch.float64)
    if loss == "mse":
        return x, torch.randn(SAMPLES, outputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(max(outputs, 2), (SAMPLES,), generator=generator)


def torchs(loss: Loss, output: Tensor, y: Tensor) -> Tensor:
    if loss == "mse":
        return functional.mse_loss(output, y)
    if output.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(output[:, 0], y.double())
    return functional.cross_entropy(output, y)


def model_with(outputs: int) -> nn.Sequential:
    model = smooth_cnn()
    model.classifier = nn.Linear(12, outputs)
    return model


def check_steps(
    spec: str, training: TrainingConfig, outputs: int, seed: int, signature: str = "train"
) -> None:
    """Compare `STEPS` steps of a whole model with steps of PyTorch."""
    torch.manual_seed(seed)
    model = model_with(outputs)
    submodel = split(model, spec, INPUT_SHAPE, training)
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    model = copy.deepcopy(model).double().train()
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = BUILT[training.optimizer](model.parameters(), lr=RATE, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        x, y = draw(training.loss, outputs, generator)
        came = eager.call(submodel, signature, state, x=x, y=y, rate=RATE)
        state |= {name: value for name, value in came.items() if name != "loss"}
        optimizer.zero_grad()
        loss = torchs(training.loss, model(x), y)
        moved = [(p - first[n]).square().sum() for n, p in model.named_parameters()]
        (loss + training.proximal / 2 * torch.stack(moved).sum()).backward()
        optimizer.step()
        torch.testing.assert_close(came["loss"], loss.detach(), **CLOSE)
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(state[name], value, **CLOSE)


@pytest.mark.parametrize("proximal", [0.0, 0.7])
@pytest.mark.parametrize("optimizer", BUILT)
def test_optimizers(optimizer: Optimizer, proximal: float, seed: int) -> None:
    training = config(optimizer=optimizer, proximal=proximal)
    check_steps("full", training, CLASSES, seed)


@pytest.mark.parametrize(
    ("loss", "outputs"),
    half_quick(
        [("cross-entropy", 4), ("cross-entropy", 1), ("binary-cross-entropy", 1), ("mse", 3)]
    ),
)
def test_losses(loss: Loss, outputs: int, seed: int) -> None:
    check_steps("width:1.0", config(loss=loss), outputs, seed)


def test_names_are_the_exporters() -> None:
    assert get_args(Optimizer) == tuple(BUILT)


SPECS = ["full", "low-rank:0.25", "slice:residual", "cp:2.0", "width:0.5", "pfedme"]


@pytest.mark.parametrize("spec", some_long(SPECS, "low-rank:0.25", "width:0.5"))
def test_every_family_judges_what_it_predicts(spec: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = smooth_cnn()
    submodel = split(model, spec, INPUT_SHAPE)
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    if any(s.name == "personal_init" for s in submodel.program.signatures):
        state |= eager.call(submodel, "personal_init", state)
    x, y = draw("cross-entropy", CLASSES, torch.Generator().manual_seed(seed))
    x = eager.recorded(submodel, state, x)
    logits = eager.call(submodel, "predict", state, x=x)["output"]
    came = eager.call(submodel, "evaluate", state, x=x, y=y)
    torch.testing.assert_close(came["loss"], functional.cross_entropy(logits, y))
    assert float(came["correct"]) == int((logits.argmax(1) == y).sum())


@pytest.mark.parametrize("optimizer", some_long(["adam", "adamw"], "adam"))
def test_a_personal_model_has_an_adam_of_its_own(optimizer: Optimizer, seed: int) -> None:
    """Each optimizer counts the steps of its own model."""
    training = config(optimizer=optimizer)
    submodel = split(smooth_cnn(), "cp:2.0", INPUT_SHAPE, training)
    names = [entry.name for entry in submodel.program.tensors]
    assert len(names) == len(set(names))
    model = smooth_cnn()
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    state |= eager.call(submodel, "personal_init", state)
    x, y = draw("cross-entropy", CLASSES, torch.Generator().manual_seed(seed))
    for _ in range(3):
        state |= eager.call(submodel, "personal_step", state, x=x, y=y, rate=RATE)
    state |= eager.call(submodel, "factor_step", state, rate=RATE)
    assert (float(state["personal_steps"]), float(state["adam_steps"])) == (3, 1)


@pytest.mark.parametrize("spec", some_long(SPECS, "low-rank:0.25", "width:0.5"))
def test_every_family_refuses_a_loss_that_does_not_fit(spec: str) -> None:
    with refused("model.loss-mismatch", loss="dice"):
        split(smooth_cnn(), spec, INPUT_SHAPE, TrainingConfig(loss="dice"))


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"loss": "hinge"}, "cross-entropy, binary-cross-entropy, ctc, mse"),
        ({"optimizer": "lion"}, '"sgd", "nesterov", "adam", "adamw"'),
        ({"proximal": -1.0}, "at least 0"),
        ({"momentum": 1.0}, "below 1"),
        ({"round_decay": 0.0}, "above 0 and at most 1"),
        ({"batch_size": 1}, "at least 2"),
        ({"steps": 0}, "from 1"),
        ({"milestones": (3, 2)}, "ascending"),
        ({"milestones": (0, 2)}, "ascending"),
        ({"learning_rate": 1e39}, "the largest float32"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], allowed: str) -> None:
    ((option, value),) = settings.items()
    with refused("option.invalid-value", option=option, value=str(value)) as caught:
        TrainingConfig(**settings)  # type: ignore[arg-type]
    assert all(part in str(caught.value) for part in (option, str(value), allowed))


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"optimizer": "nesterov", "momentum": 0.0}, ["optimizer", "momentum"]),
        ({"loss": "mse", "masked": True}, ["masked", "loss"]),
        ({"steps": 3, "epochs": 2}, ["steps", "epochs"]),
    ],
)
def test_settings_that_cannot_be_together(settings: dict[str, object], options: list[str]) -> None:
    with refused("option.conflict", options=options):
        TrainingConfig(**settings)  # type: ignore[arg-type]
