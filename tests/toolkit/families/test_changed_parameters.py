"""Models that change a parameter before they use it, against plain PyTorch loops in float64."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import eager
from device_agent.formats.update import read_update
from edgetailor import TrainingConfig, export, split
from exporters.export import Format
from exporters.recording.capture import SharedRecording, capture
from parameters import needs_litert
from refusals import refused
from toolkit.inspection import cut_places
from toolkit.submodels.global_model import from_model
from toolkit.submodels.submodel import Submodel
from trainings import train_bundle

CLASSES, SAMPLES, STEPS, RATE = 3, 8, 3, 0.05
Change = Callable[["Changing", Tensor], None]


class Changing(nn.Module):
    """A convolution whose weight `change` rewrites, and a linear layer."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.layer, self.last = nn.Conv1d(2, 4, 3), nn.Linear(16, CLASSES)
        self.change, self.scale = change, nn.Parameter(torch.rand(4, 1, 1))
        self.register_buffer("mask", (torch.rand(4, 2, 3) > 0.3).float())
        self.ready = False
        with torch.no_grad():
            self.layer.weight.mul_(4)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.last(functional.elu(self.layer(x)).flatten(1))


def largest_norm(model: Changing, _: Tensor) -> None:
    weight = model.layer.weight
    weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=1)


def clamped(model: Changing, _: Tensor) -> None:
    with torch.no_grad():
        model.layer.weight.clamp_(-0.5, 0.5)
        model.last.weight.clamp_(-0.1, 0.1)


def divided(model: Changing, _: Tensor) -> None:
    with torch.no_grad():
        norm = model.layer.weight.norm(2, dim=(1, 2), keepdim=True)
        model.layer.weight.div_(norm.clamp(min=1))


def masked(model: Changing, _: Tensor) -> None:
    model.layer.weight.data *= model.mask


def rows(model: Changing, _: Tensor) -> None:
    model.layer.weight.data[0] = 0
    model.last.bias.data.copy_(model.last.bias.data - model.last.bias.data.mean())


def decayed(model: Changing, _: Tensor) -> None:
    if model.training:
        with torch.no_grad():
            model.layer.weight.copy_(model.layer.weight / 2)


def by_another(model: Changing, _: Tensor) -> None:
    model.layer.weight.data = model.layer.weight.data.sign() * model.scale.data.abs()


CHANGES = (largest_norm, clamped, divided, masked, rows, decayed, by_another)
PLAIN = TrainingConfig(learning_rate=RATE, momentum=0.0)
CONFIGS = {
    "momentum": TrainingConfig(learning_rate=RATE, momentum=0.9, weight_decay=0.1),
    "adam": TrainingConfig(learning_rate=RATE, optimizer="adam"),
    "proximal": TrainingConfig(learning_rate=RATE, momentum=0.0, proximal=0.5),
}


def trained(model: nn.Module, config: TrainingConfig, x: Tensor, y: Tensor) -> nn.Module:
    """The model after plain PyTorch steps on the batch."""
    model = copy.deepcopy(model).double().train()
    first = [p.detach().clone() for p in model.parameters()]
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), RATE, config.momentum, weight_decay=config.weight_decay
        )
    for _ in range(STEPS):
        loss = functional.cross_entropy(model(x), y)
        if config.proximal:
            pairs = zip(model.parameters(), first, strict=True)
            loss = loss + config.proximal / 2 * sum(((p - old) ** 2).sum() for p, old in pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 2, 6, generator=draw)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=draw)


def after_steps(submodel: Submodel, model: nn.Module, x: Tensor, y: Tensor) -> eager.State:
    """The device's state after the steps."""
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    for _ in range(STEPS):
        state |= eager.call(submodel, "train", state, x=x, y=y, rate=RATE)
    return state


def check(model: Changing, config: TrainingConfig, seed: int) -> None:
    x, y = batch(seed)
    before = copy.deepcopy(model.state_dict())
    submodel = split(model, "full", (2, 6), config)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), "recording changed the user's model"
    state = after_steps(submodel, model, x.double(), y)
    right = trained(model, config, x.double(), y)
    for name, value in right.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-7, atol=1e-9, msg=name)
    predicted = eager.call(submodel, "predict", state, x=x.double())["output"]
    evaluated = eager.call(submodel, "evaluate", state, x=x.double(), y=y)["loss"]
    output = right.eval()(x.double())
    torch.testing.assert_close(predicted, output, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(evaluated, functional.cross_entropy(output, y), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("change", CHANGES)
def test_steps_start_from_the_changed_value(change: Change, seed: int) -> None:
    torch.manual_seed(seed)
    check(Changing(change), PLAIN, seed)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_optimizer_steps_from_the_changed_value(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    check(Changing(largest_norm), CONFIGS[name], seed)


@pytest.mark.parametrize("format", ["onnx", "tflite"])
def test_an_agent_trains_as_pytorch_does(format: Format, seed: int, tmp_path: Path) -> None:
    needs_litert(format)
    torch.manual_seed(seed)
    model, (x, y) = Changing(largest_norm), batch(seed)
    config = TrainingConfig(batch_size=SAMPLES, epochs=STEPS, learning_rate=RATE, momentum=0.9)
    bundle, data = tmp_path / "bundle", tmp_path / "data.npz"
    export(split(model, "full", (2, 6), config), from_model(model), bundle, format=format)
    np.savez(data, x=x.numpy(), y=y.numpy())
    train_bundle(bundle, data, tmp_path / "update")
    _, sent = read_update(tmp_path / "update")
    right = trained(model, config, x.double(), y)
    for name, value in right.named_parameters():
        change = value - model.get_parameter(name)
        rounding = STEPS * 2**-23 * value.norm()
        assert (torch.tensor(sent[name]) - value).norm() <= 1e-5 * change.norm() + rounding, name


FAMILIES = ("low-rank:0.5", "slice:last", "width:0.5", "depth:0.5", "cp:2.0", "pfedme")


def test_other_families_refuse_the_model() -> None:
    model = Changing(largest_norm)
    with SharedRecording(model, (2, 6)):
        for spec in FAMILIES:
            with refused("spec.changed-parameter", tensor="layer.weight"):
                split(model, spec, (2, 6))
        with refused("spec.changed-parameter", tensor="layer.weight"):
            cut_places(capture(model, (2, 6)), 8)


def test_steps_with_private_samples_refuse_the_model() -> None:
    config = TrainingConfig(sample_clip=1.0, sample_noise=1.0)
    with refused("privacy.changed-parameter", tensor="layer.weight"):
        split(Changing(largest_norm), "full", (2, 6), config)


def from_first_batch(model: Changing, x: Tensor) -> None:
    if not model.ready:
        model.layer.bias.data = -model.layer(x).mean((0, 2)).detach()
        model.ready = True


def at_random(model: Changing, _: Tensor) -> None:
    if model.training:
        model.layer.weight.data += 0.1 * torch.randn(4, 2, 3)


def halved(model: Changing, _: Tensor) -> None:
    model.layer.weight.data.mul_(0.5)


def beside(model: Changing, _: Tensor) -> None:
    weight = model.layer.weight
    if not hasattr(weight, "org"):
        weight.org = weight.data.clone()
    weight.data = weight.org.sign()


def of_another_shape(model: Changing, _: Tensor) -> None:
    model.layer.bias.data = model.layer.bias.data[:1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (from_first_batch, "run the model once on real samples"),
        (at_random, "from samples, random numbers or averages"),
        (halved, "if self.training:"),
        (of_another_shape, "of another shape"),
        (beside, "Register the tensor as a buffer"),
    ],
)
def test_other_changes_are_refused(change: Change, words: str) -> None:
    with refused("model.writes-own-tensor", words):
        capture(Changing(change), (2, 6))


class Later(Changing):
    """Changes the weight after its use, or uses a copy from before the change."""

    def __init__(self, copied: bool) -> None:
        super().__init__(clamped)
        self.copied = copied

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight * 2 if self.copied else self.layer.weight
        h = functional.conv1d(x, weight) if not self.copied else x
        self.layer.weight.data.clamp_(-0.5, 0.5)
        h = functional.conv1d(h, weight) if self.copied else h
        return self.last(h.flatten(1))


@pytest.mark.parametrize("copied", [False, True])
def test_a_use_before_the_change_is_refused(copied: bool) -> None:
    with refused("model.writes-own-tensor") as caught:
        capture(Later(copied), (2, 6))
    assert "before all uses" in str(caught.value)
    assert "test_changed_parameters.py, line" in str(caught.value)
