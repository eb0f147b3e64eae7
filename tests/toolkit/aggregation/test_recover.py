"""A user's own aggregation by the public functions, and what it starts from."""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from refusals import refused
from toolkit.aggregation.aggregate import Received, Strategy, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.recover import RecoveredUpdate, recover
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from updates import (
    KINDS,
    OLD,
    PARAMETERS,
    Array,
    assert_model,
    averaged,
    cp_update,
    dense_of,
    entry,
    full_update,
    low_rank_update,
    narrow_update,
    numbers,
    record_of,
    slice_update,
)


def in_full(update: Received) -> tuple[dict[str, Array], dict[str, Array]]:
    """What `recover` must give of an update: values and weights, by numpy."""
    record, arrays = update
    if record.submodel != "width:0.5":
        dense = dense_of(update)
        return dense, {name: np.full(v.shape, float(record.samples)) for name, v in dense.items()}
    values = OLD.tensors["c"].double().numpy().copy()
    weights = np.zeros(values.shape)
    where = np.ix_([0, 1, 3], [1, 2], range(3), range(3))
    values[where], weights[where] = arrays["c"], record.samples
    return {"c": values}, {"c": weights}


@pytest.mark.parametrize("make", [*KINDS.values(), narrow_update])
def test_every_family_is_recovered_in_full_shape(make: partial[Received]) -> None:
    update = make(3, samples=7)
    recovered = recover(update, OLD)
    values, weights = in_full(update)
    assert recovered.record == update[0]
    assert recovered.tensors.keys() == recovered.weights.keys() == values.keys()
    for name, value in values.items():
        assert recovered.tensors[name].shape == PARAMETERS[name]
        assert recovered.tensors[name].dtype == recovered.weights[name].dtype == torch.float32
        np.testing.assert_allclose(recovered.tensors[name].numpy(), value, rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(recovered.weights[name].numpy(), weights[name])


def test_what_is_recovered_is_the_caller_s(seed: int) -> None:
    record, arrays = full_update(seed)
    before = {name: array.copy() for name, array in arrays.items()}
    recovered = recover((record, arrays), OLD)
    for value in recovered.tensors.values():
        value.zero_()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])


def test_weights_are_the_policys() -> None:
    uniform = recover(full_update(1, 9), OLD, AggregationPolicy(weights="uniform"))
    assert uniform.weights["w"].unique().tolist() == [1.0]
    softmax = AggregationPolicy(weights="softmax", temperature=0.5)
    quarter = recover(low_rank_update(1, ratio=0.25), OLD, softmax)
    assert quarter.weights["c"].unique().tolist() == pytest.approx([np.exp(-0.75 / 0.5)])


def median(model: GlobalModel, updates: Iterator[RecoveredUpdate]) -> Mapping[str, Tensor]:
    """The median of each element over the updates that hold it."""
    held = list(updates)
    new = {}
    for name in {name for update in held for name in update.tensors}:
        values = torch.stack([update.tensors[name] for update in held if name in update.tensors])
        weights = torch.stack([update.weights[name] for update in held if name in update.weights])
        values[weights == 0] = torch.nan
        middle = torch.nanquantile(values, 0.5, dim=0)
        new[name] = torch.where(middle.isnan(), model.tensors[name], middle)
    return new


def numpy_median(updates: list[Received]) -> dict[str, Array]:
    parts = [in_full(update) for update in updates]
    expected = {}
    for name, old in OLD.tensors.items():
        held = [
            np.where(weights[name] > 0, values[name], np.nan)
            for values, weights in parts
            if name in values
        ]
        with np.errstate(all="ignore"):
            middle = np.nanmedian(np.stack(held), axis=0)
        expected[name] = np.where(np.isnan(middle), old.double().numpy(), middle)
    return expected


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_median_of_mixed_families_is_numpys(seed: int) -> None:
    draw = np.random.default_rng(seed)
    makers = [full_update, low_rank_update, cp_update, slice_update, narrow_update, narrow_update]
    updates = [make(int(draw.integers(10**6))) for make in makers]
    new = aggregate(OLD, updates, strategy=median)
    assert_model(new, numpy_median(updates))
    # Kept factors follow the new model, as they do by default.
    assert new.kept.keys() == {"cp:2.0"}
    assert new.kept["cp:2.0"].keys() == aggregate(OLD, updates).kept["cp:2.0"].keys()
    narrow = [narrow_update(1), narrow_update(2)]
    kept = {"w": OLD.tensors["w"].double().numpy()}
    expected = numpy_median([*narrow, slice_update(0)]) | kept
    assert_model(aggregate(OLD, narrow, strategy=median), expected)


def mean(model: GlobalModel, updates: Iterator[RecoveredUpdate]) -> Mapping[str, Tensor]:
    """The weighted mean, as a stream."""
    sums: dict[str, Tensor] = {}
    shares: dict[str, Tensor] = {}
    for update in updates:
        for name, value in update.tensors.items():
            sums[name] = sums.get(name, torch.zeros(())) + value * update.weights[name]
            shares[name] = shares.get(name, torch.zeros(())) + update.weights[name]
    return {name: sums[name] / shares[name] for name in sums}


def test_a_strategy_can_be_the_default() -> None:
    updates = [full_update(1, 2), low_rank_update(2, 5), cp_update(3, 1), slice_update(4, 9)]
    parts = [(dense_of(update), float(update[0].samples)) for update in updates]
    assert_model(aggregate(OLD, updates, strategy=mean), averaged(parts))


def test_a_strategy_that_ignores_updates_keeps_the_model() -> None:
    new = aggregate(OLD, [cp_update(1), full_update(2)], strategy=lambda model, updates: {})
    assert all(new.tensors[name] is OLD.tensors[name] for name in PARAMETERS)
    assert new.kept.keys() == {"cp:2.0"}
    with refused("aggregate.no-update"):
        aggregate(OLD, [], strategy=mean)


@pytest.mark.parametrize(
    ("returned", "code", "name"),
    [
        ({"x": torch.zeros(2)}, "aggregate.unknown-tensor", "x"),
        ({"w": torch.zeros(3, 2)}, "aggregate.wrong-shape", "w"),
        ({"w": torch.full((2, 3), torch.inf)}, "aggregate.not-finite", "w"),
    ],
)
def test_what_a_strategy_returns_is_checked(
    returned: dict[str, Tensor], code: str, name: str
) -> None:
    strategy: Strategy = lambda model, updates: returned  # noqa: E731
    with refused(code, parameter=name):
        aggregate(OLD, [full_update(1)], strategy=strategy)


def test_a_federation_takes_a_strategy() -> None:
    federation = Federation(
        "toolkit.models:digits_cnn", (1, 8, 8), TrainingConfig(), strategy=lambda model, updates: {
            name: value + 1 for name, value in next(updates).tensors.items()
        },
    )  # fmt: skip
    name, value = next(iter(federation.model.tensors.items()))
    array = numbers(tuple(value.shape), 5)
    table = (entry(name, array.shape, name),)
    federation.fold([(record_of("full", 1, table), {name: array})])
    np.testing.assert_allclose(federation.model.tensors[name].numpy(), array + 1, rtol=1e-6)


def test_an_update_that_does_not_fit_is_refused() -> None:
    record, arrays = full_update(1)
    with refused("update.unknown-parameter", parameter="c"):
        recover((record, arrays), GlobalModel({"w": torch.zeros(2, 3)}))
