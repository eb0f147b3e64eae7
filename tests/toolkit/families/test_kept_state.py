"""Models that change tensors of their own while they train, against plain PyTorch in float64."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import eager
import oracles
from device_agent.formats.atomic_files import write_folder
from device_agent.formats.update import read_update
from edgetailor import Federation, TrainingConfig, split
from kept_state import CLASSES, KEEPING, between_layers
from oracles import Device, Plan
from parameters import half_quick
from refusals import refused
from toolkit.submodels.global_model import from_model
from trainings import train_bundle, training_config

RATE, STEPS = 0.05, 3


@pytest.mark.parametrize("name", half_quick(KEEPING))
def test_steps_change_the_same_tensors_as_in_pytorch(name: str, seed: int) -> None:
    """Parameters and all that the model keeps, over several steps."""
    torch.manual_seed(seed)
    model = between_layers(KEEPING[name]())
    submodel = split(model, "full", (4,), TrainingConfig(learning_rate=RATE, momentum=0))
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    first = {n: v.clone() for n, v in state.items()}
    model = copy.deepcopy(model).double().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        x = torch.randn(7, 4, generator=draw, dtype=torch.float64)
        y = torch.randint(CLASSES, (7,), generator=draw)
        came = eager.call(submodel, "train", state, x=x, y=y, rate=RATE)
        state |= {n: v for n, v in came.items() if n != "loss"}
        loss = functional.cross_entropy(model(x), y)
        oracles.descend(optimizer, loss)
        torch.testing.assert_close(came["loss"], loss.detach(), rtol=1e-9, atol=1e-11)
    after = model.state_dict()
    for tensor, value in state.items():
        torch.testing.assert_close(value, after[tensor], rtol=1e-7, atol=1e-9)
    kept = [n for n in first if n not in dict(model[0].named_parameters(prefix="0"))]
    assert any(not torch.equal(first[n], state[n]) for n in kept)
    x = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    predicted = eager.call(submodel, "predict", state, x=x)["output"]
    torch.testing.assert_close(predicted, model.eval()(x).detach(), rtol=1e-7, atol=1e-9)


PLAN = Plan(batch_size=8, epochs=1, rate=0.1, momentum=0.9, weight_decay=0.0)


def test_a_round_averages_what_models_keep(seed: int, tmp_path: Path) -> None:
    """Two agents and numpy's average; the slice trains on recordings before the own norm."""
    federation = Federation(
        "kept_state:averaged_model", (4,), training_config(PLAN), seed=seed % 1000
    )
    old = oracles.state_of(federation.module)
    draw = np.random.default_rng(seed)
    devices = [
        Device(
            draw.normal(n, 1, (size, 4)).astype(np.float32),
            draw.integers(CLASSES, size=size),
            seed=n,
        )
        for n, size in enumerate((21, 10))
    ]
    for device, spec in zip(devices, ("full", "slice:2"), strict=True):
        bundle = tmp_path / spec.replace(":", "-")
        write_folder(bundle, federation.bundle(spec))
        np.savez(bundle / "data.npz", x=device.x, y=device.y)
        train_bundle(
            bundle, str(bundle / "data.npz"), bundle / "update", threads=1, seed=device.seed
        )
    assert isinstance(federation.module, nn.Sequential)
    expected = oracles.mean(
        [
            (oracles.train_full(federation.module, devices[0], PLAN), 21),
            (oracles.train_slice(federation.module, "2", devices[1], PLAN), 10),
        ],
        old,
    )
    federation.fold([read_update(tmp_path / part / "update") for part in ("full", "slice-2")])
    federation.model.load_into(federation.module)
    came = oracles.state_of(federation.module)
    assert {"2.mean", "2.var"} <= came.keys()
    for name, value in expected.items():
        torch.testing.assert_close(came[name], value, rtol=1e-4, atol=1e-5, msg=name)
        assert not torch.equal(came[name], old[name])


class Writing(nn.Module):
    """A model that writes where it must not."""

    def __init__(self, write: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(4, CLASSES), write
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("passing", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        return self.layer(x - self.mean - self.passing)


def always(model: nn.Module, x: Tensor) -> None:
    model.mean.copy_(x.detach().mean(0))


def unsaved(model: nn.Module, x: Tensor) -> None:
    if model.training:
        model.passing.copy_(x.detach().mean(0))


@pytest.mark.parametrize(
    ("write", "tensor", "remedy"),
    [
        (always, "mean", "if self.training:"),
        (unsaved, "passing", "float32 and saved with it"),
    ],
)
def test_other_writes_are_refused(
    write: Callable[[nn.Module, Tensor], None], tensor: str, remedy: str
) -> None:
    with refused("model.writes-own-tensor", tensor=tensor) as caught:
        split(Writing(write), "full", (4,))
    assert remedy in str(caught.value)
    assert "test_kept_state.py, line" in str(caught.value)


def test_static_statistics_are_refused_for_a_model_that_keeps_averages() -> None:
    """Devices would change nothing, and the server computes statistics of batch norms alone."""
    model = between_layers(KEEPING["assigned averages"]())
    with refused("model.static-state", tensor="2.mean"):
        split(model, "full", (4,), TrainingConfig(batch_norm="static"))
