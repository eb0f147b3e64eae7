"""The influence of each update on the loss equals plain PyTorch's, for every family."""

from collections.abc import Sequence
from dataclasses import replace as replaced
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from device_agent.data.local_data import LocalData
from device_agent.formats.manifest import uploaded
from hostile_fleet import SPECS, HostileFleet, samples
from models_for_tests import CLASSES, INPUT_SHAPE
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.influence import (
    TensorInfluences,
    influence,
    influences,
    mean_gradient,
)
from toolkit.aggregation.limits.reference import Reference, RoundLimits
from toolkit.aggregation.limits.update_limits import limited_update
from toolkit.aggregation.recover import recover_checked
from toolkit.simulation.torch_executor import TorchExecutor
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.rolling_window import in_round
from updates import record_of


@pytest.fixture(scope="module")
def fleet() -> HostileFleet:
    return HostileFleet()


def test_the_gradient_is_that_of_plain_torch(fleet: HostileFleet) -> None:
    federation = fleet.federation
    federation.load(fleet.first)
    gradient = federation.gradient(*fleet.held_out)
    federation.model.lend_to(federation.module)
    module = federation.module.double()
    x, y = map(torch.from_numpy, fleet.held_out)
    functional.cross_entropy(module(x.double()), y).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    module.float()
    assert gradient.keys() == expected.keys()
    for name, value in gradient.items():
        assert expected[name] is not None
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-4, atol=1e-7)


def test_a_loss_that_is_not_finite_has_no_gradient(fleet: HostileFleet) -> None:
    federation = fleet.federation
    federation.load(fleet.first)
    tensors = {**federation.model.tensors}
    tensors["classifier.bias"] = torch.full((CLASSES,), float("nan"))
    federation.model = replaced(federation.model, tensors=tensors)
    assert federation.gradient(*fleet.held_out) == {}
    federation.load(fleet.first)


@pytest.mark.parametrize("times", [1, 50])
def test_the_influence_is_the_inner_product_with_the_recovered_change(
    fleet: HostileFleet, seed: int, times: int
) -> None:
    """Of a limited update and of what its device received, both in the global model's shapes."""
    updates = fleet.first_round(SPECS)
    federation, draw = fleet.federation, torch.Generator().manual_seed(seed)
    model, policy = federation.model, federation.policy
    reference = Reference().completed([federation.figures(update) for update in updates])
    gradient = {
        name: torch.randn(value.shape, generator=draw)
        for name, value in model.tensors.items()
        if "running" not in name and "num_batches" not in name
    }
    for spec, (record, arrays) in zip(SPECS, updates, strict=True):
        received = fleet.received(spec)
        enlarged = {n: received[n] + times * (value - received[n]) for n, value in arrays.items()}
        update = record, enlarged
        limited = limited_update(update, RoundLimits(reference), model, policy)
        new, old = (
            recover_checked(own, model, replaced(policy, factors="act"))
            for own in (limited, (record, received))
        )
        found = influence(update, gradient, model, policy, reference)
        assert found.products.keys() == new.tensors.keys() & gradient.keys()
        for name, product in found.products.items():
            change = new.tensors[name].double() - old.tensors[name].double()
            expected = (change * gradient[name]).sum().item()
            assert product == pytest.approx(expected, rel=1e-3, abs=1e-5), (spec, name)
        assert found.weight == limited[0].samples


def test_the_channels_of_a_rolling_window_meet_their_part_of_the_gradient(
    fleet: HostileFleet, seed: int
) -> None:
    federation, draw = fleet.federation, torch.Generator().manual_seed(seed)
    federation.load(fleet.first)
    model = federation.model
    model.lend_to(federation.module)  # splitting checks the weights, which another test spoils
    submodel = in_round(federation.submodel("width:0.5,window=rolling"), 2)
    table, old = uploaded(submodel.program.tensors), submodel.cut(model)
    new = {e.name: old[e.name] + torch.randn(e.shape, generator=draw) for e in table}
    arrays = {name: value.numpy() for name, value in new.items()}
    record = record_of("width:0.5,window=rolling", 10, table)
    gradient = {name: torch.randn(v.shape, generator=draw) for name, v in model.tensors.items()}
    # The same cut of the gradient as of the model: the numbers that the device holds.
    own = submodel.cut(replaced(model, tensors=gradient))
    found = influence((record, arrays), gradient, model, federation.policy, None)
    for entry in table:
        if entry.role != "parameter":
            continue
        change = new[entry.name].double() - old[entry.name]
        expected = (change * own[entry.name]).sum().item()
        assert entry.stands_for is not None
        assert found.products[entry.stands_for] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_shares_are_those_of_the_updates_that_hold_a_tensor() -> None:
    found = influences(
        {
            "a": TensorInfluences(30, {"both": 1.0, "alone": 2.0}),
            "b": TensorInfluences(10, {"both": -4.0}).weakened(0.5),
            "c": TensorInfluences(5, {"huge": float("nan")}),
        }
    )
    assert found == {"a": 30 / 40 + 2.0, "b": -0.5, "c": float("inf")}
    assert mean_gradient({}, {"w": torch.ones(1)}) == {"w": torch.ones(1)}
    assert mean_gradient({"w": torch.zeros(1)}, {"w": torch.ones(1)}) == {"w": torch.ones(1) / 2}


def test_influences_add_up_to_the_change_of_a_quadratic_loss(seed: int, tmp_path: Path) -> None:
    """The trapezoid rule is exact for it: a linear model with the mean squared error."""
    training = TrainingConfig(loss="mse", learning_rate=0.01, batch_size=8)
    federation = Federation("models_for_tests:linear", INPUT_SHAPE, training, seed=seed % 1000)
    draw = np.random.default_rng(seed)

    def numbers(count: int) -> tuple[np.ndarray, np.ndarray]:
        x, _ = samples(count, int(draw.integers(1000)))
        return x, draw.normal(size=(count, CLASSES)).astype(np.float32)

    held_out, executor = numbers(40), TorchExecutor(federation.submodel("full"))
    bundle = executor.bundle(federation.model, 1.0, 1)
    trained = [
        executor.train(bundle, LocalData(*numbers(count)), count, {}, 0.0) for count in (9, 20, 14)
    ]
    updates: Sequence[Received] = [(done.record, done.tensors) for done in trained]
    first = federation.model
    before, start = federation.evaluation(*held_out).loss, federation.gradient(*held_out)
    federation.fold(updates)
    after, end = federation.evaluation(*held_out).loss, federation.gradient(*held_out)
    gradient = mean_gradient(start, end)
    own = {
        str(n): influence(update, gradient, first, federation.policy, None)
        for n, update in enumerate(updates)
    }
    assert sum(influences(own).values()) == pytest.approx(after - before, rel=1e-3, abs=1e-5)
