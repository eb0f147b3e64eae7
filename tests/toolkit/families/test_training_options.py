"""Options of `[training]`: a round on a device against a PyTorch loop."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import eager
import oracles
from device_agent.formats.atomic_files import write_folder
from device_agent.formats.update import read_update
from edgetailor import Federation, TrainingConfig, split
from models_for_tests import CLASSES, INPUT_SHAPE
from oracles import Device, Plan
from parameters import some_long
from refusals import refused
from toolkit.submodels.global_model import from_model
from trainings import train_bundle, training_config

PLAN = Plan(batch_size=8, epochs=2, rate=0.1, momentum=0.9, weight_decay=0.01)
PRESENT = (0, 2)


def federation(seed: int) -> Federation:
    training = training_config(PLAN, batch_norm="static", masked=True)
    return Federation("models_for_tests:smooth_cnn", INPUT_SHAPE, training, seed=seed)


def local_data(seed: int) -> Device:
    draw = np.random.default_rng(seed)
    x = draw.normal(0.5, 2, (21, *INPUT_SHAPE)).astype(np.float32)
    return Device(x, draw.choice(PRESENT, size=21).astype(np.int64), seed=5)


def masked_round(model: nn.Module, device: Device) -> oracles.State:
    model = copy.deepcopy(model).double().train()
    mask = torch.tensor([float(c in PRESENT) for c in range(CLASSES)])
    optimizer = oracles.sgd([{"params": list(model.parameters())}], PLAN)
    x = torch.from_numpy(device.x).double()
    for y, indices in device.visits(PLAN):
        oracles.descend(optimizer, cross_entropy(model(x[indices]) * mask, y))
    return oracles.state_of(model)


def statistics(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: v for n, v in state.items() if "running" in n}


def test_a_round_without_statistics_and_absent_classes(seed: int, tmp_path: Path) -> None:
    fleet, device = federation(seed), local_data(seed)
    fleet.model.load_into(fleet.module)
    first, expected = oracles.state_of(fleet.module), masked_round(fleet.module, device)
    bundle = tmp_path / "bundle"
    write_folder(bundle, fleet.bundle("full"))
    np.savez(tmp_path / "data.npz", x=device.x, y=device.y)
    data_file = str(tmp_path / "data.npz")
    train_bundle(bundle, data_file, tmp_path / "update", threads=1, seed=device.seed)
    record = json.loads((tmp_path / "update" / "update.json").read_text())
    assert not [t["name"] for t in record["tensors"] if "running" in t["name"]]
    assert record["classes"] == list(PRESENT)

    fleet.fold([read_update(tmp_path / "update")])
    fleet.model.load_into(fleet.module)
    came = oracles.state_of(fleet.module)
    absent = [c for c in range(CLASSES) if c not in PRESENT]
    for name in ("classifier.weight", "classifier.bias"):
        expected[name][absent] = first[name][absent]  # rows of these classes are not averaged
    for name, value in expected.items():
        if "running" in name:
            assert torch.equal(came[name], first[name]), name
        else:
            assert float((came[name] - value).norm()) <= 1e-4 * float(value.norm()), name

    fleet.evaluate(device.x, device.y)
    model = copy.deepcopy(fleet.module).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = 1.0  # one batch of all samples is all there is
    with torch.no_grad():
        model(torch.from_numpy(device.x))
    for name, value in statistics(model.state_dict()).items():
        torch.testing.assert_close(fleet.model.tensors[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", some_long([1, 3, 5], 3))
@pytest.mark.parametrize("spec", ["full", "slice:residual"])
def test_a_round_of_steps(spec: str, steps: int, seed: int, tmp_path: Path) -> None:
    """Of three batches an epoch: one batch, a whole epoch, and an end within the second one."""
    plan = replace(PLAN, steps=steps)
    training = TrainingConfig(
        batch_size=plan.batch_size, steps=steps, learning_rate=plan.rate, weight_decay=0.01
    )
    fleet = Federation("models_for_tests:smooth_cnn", INPUT_SHAPE, training, seed=seed)
    device = local_data(seed)
    write_folder(tmp_path / "bundle", fleet.bundle(spec))
    data, out = (device.x, device.y), tmp_path / "update"
    trained = train_bundle(tmp_path / "bundle", data, out, threads=1, seed=device.seed)
    assert trained.record.steps == steps
    model = fleet.module
    assert isinstance(model, nn.Sequential)
    expected = (
        oracles.train_full(model, device, plan)
        if spec == "full"
        else oracles.train_slice(model, "residual", device, plan)
    )
    _, tensors = read_update(tmp_path / "update")
    for name, value in expected.items():
        gap = float((torch.from_numpy(tensors[name]) - value).norm())
        assert gap <= 1e-4 * float(value.norm()) + 1e-6, name


@given(
    milestones=st.sets(st.integers(1, 9), min_size=1).map(sorted),
    decay=st.floats(0.1, 1),
    rounds=st.just(10),
)
def test_milestones_are_those_of_pytorch(milestones: list[int], decay: float, rounds: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, decay)
    training = TrainingConfig(round_decay=decay, milestones=tuple(milestones))
    for round_ in range(1, rounds + 1):
        (expected,) = schedule.get_last_lr()
        assert training.rate_factor(round_) == pytest.approx(expected)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    "spec", some_long(["low-rank:0.25", "slice:residual", "cp:2.0", "width:0.5"], "low-rank:0.25")
)
def test_no_family_sends_static_statistics(spec: str, seed: int) -> None:
    submodel = federation(seed).submodel(spec)
    held = {e.stands_for: e.role for e in submodel.program.tensors if e.stands_for}
    assert {role for name, role in held.items() if "running" in name} == {"frozen"}
    assert any(p.kind == "classes" for s in submodel.program.signatures for p in s.inputs)


def test_unknown_kinds_of_batch_norm_are_refused() -> None:
    with refused("option.invalid-value", option="batch_norm", value="local") as caught:
        replace(TrainingConfig(), batch_norm="local")  # type: ignore[arg-type]
    assert '"global" or "static"' in str(caught.value)


class WithUnused(nn.Linear):
    """A layer with a parameter that it does not use, as models of transformers have."""

    def __init__(self) -> None:
        super().__init__(4, CLASSES)
        self.unused = nn.Parameter(torch.ones(3))


class WithTeacher(nn.Linear):
    """A layer whose inputs are weighed by a part that gets no gradient, in three ways."""

    def __init__(self) -> None:
        super().__init__(4, CLASSES)
        self.unused = nn.Parameter(torch.ones(4))
        self.detached = nn.Parameter(torch.ones(4))
        self.compared = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x * self.unused
        return super().forward(x * self.detached.detach() * (x > self.compared))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("kind", [WithUnused, WithTeacher])
def test_a_parameter_without_a_gradient_does_not_decay(
    kind: type[nn.Linear], optimizer: str, seed: int
) -> None:
    torch.manual_seed(seed)
    model = kind()
    training = TrainingConfig(learning_rate=0.1, weight_decay=0.1, optimizer=optimizer)
    submodel = split(model, "full", (4,), training)
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(CLASSES, (6,))
    new = eager.call(submodel, "train", state, x=x, y=y, rate=0.1)
    names = [name for name in dict(model.named_parameters()) if name not in ("weight", "bias")]
    for name in names:
        assert torch.equal(new[name], state[name])
    assert not torch.equal(new["weight"], state["weight"])
