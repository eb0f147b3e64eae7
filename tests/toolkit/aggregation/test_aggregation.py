"""Updates of mixed families, averaged and merged."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusals import refused
from toolkit.aggregation.aggregate import Aggregation, Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy, Factors, Weights
from toolkit.submodels.global_model import GlobalModel
from updates import (
    KINDS,
    OLD,
    Array,
    assert_model,
    averaged,
    composed,
    cp_update,
    dense_of,
    entry,
    full_update,
    low_rank_update,
    record_of,
)


def received(stands_for: str, value: Array, samples: int = 4) -> Received:
    table = (entry(stands_for, value.shape, stands_for),)
    return record_of("full", samples, table), {stands_for: value}


MODEL = GlobalModel({"w": torch.zeros(2, 3), "v": torch.ones(4)}, {"cp:9": {"f": torch.ones(1)}})


def test_nobodys_tensors_and_other_families_factors_stay() -> None:
    new = aggregate(MODEL, [received("w", np.full((2, 3), 2, np.float32))])
    assert torch.equal(new.tensors["w"], torch.full((2, 3), 2.0))
    assert new.tensors["v"] is MODEL.tensors["v"]
    assert new.kept == MODEL.kept


def test_weights_are_samples() -> None:
    zeros, fours = np.zeros((2, 3), np.float32), np.full((2, 3), 4, np.float32)
    new = aggregate(MODEL, [received("w", zeros, 3), received("w", fours, 1)])
    assert torch.equal(new.tensors["w"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("update", "code", "values"),
    [
        (received("x", np.zeros(2, np.float32)), "update.unknown-parameter", {"parameter": "x"}),
        (
            received("w", np.zeros((3, 2), np.float32)),
            "update.wrong-shape",
            {"parameter": "w", "shape": [3, 2], "expected_shape": [2, 3]},
        ),
        (
            received("w", np.zeros((2, 3), np.float32), samples=0),
            "update.unusable-samples",
            {"samples": 0, "most": 10**12},
        ),
    ],
)
def test_updates_that_do_not_fit_are_refused(
    update: Received, code: str, values: dict[str, object]
) -> None:
    with refused(code, **values):
        aggregate(MODEL, [received("w", np.ones((2, 3), np.float32)), update])
    assert torch.equal(MODEL.tensors["w"], torch.zeros(2, 3))


def test_nothing_to_aggregate_is_refused() -> None:
    with refused("aggregate.no-update"):
        aggregate(MODEL, [])


mixtures = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 10_000), st.integers(1, 500)),
    min_size=1,
    max_size=6,
)
Mixture = list[tuple[str, int, int]]


def drawn(mixture: Mixture) -> list[Received]:
    return [KINDS[kind](seed, samples) for kind, seed, samples in mixture]


@given(mixtures, st.sampled_from(["samples", "uniform"]))
def test_mixed_families_are_averaged_tensor_by_tensor(mixture: Mixture, weights: Weights) -> None:
    updates = drawn(mixture)
    by_samples = weights == "samples"
    parts = [(dense_of(u), float(u[0].samples if by_samples else 1)) for u in updates]
    policy = AggregationPolicy(weights=weights, factors="act")
    assert_model(aggregate(OLD, updates, policy), averaged(parts))


@given(mixtures, st.integers(0, 6), st.sampled_from(["afm", "act"]))
def test_aggregations_merge_in_any_order(mixture: Mixture, cut: int, factors: Factors) -> None:
    policy = AggregationPolicy(factors=factors, beta=1.5)
    updates = drawn(mixture)
    kept = {name: torch.from_numpy(array) for name, array in cp_update(98)[1].items()}
    model = GlobalModel(OLD.tensors, {"cp:2.0": kept})
    whole = aggregate(model, reversed(updates), policy)
    left, right = Aggregation(model, policy), Aggregation(model, policy)
    for number, update in enumerate(updates):
        (left if number < cut else right).add(*update)
    left.merge(right)
    merged = left.result()
    assert_model(merged, {name: value.numpy() for name, value in whole.tensors.items()})
    assert merged.kept.keys() == whole.kept.keys()


def test_factors_are_averaged_first_or_composed_first() -> None:
    updates = [cp_update(1, 1), cp_update(50, 3)]
    table = updates[0][1]
    factors = {
        name: np.average([a[name].astype(np.float64) for _, a in updates], axis=0, weights=[1, 3])
        for name in table
    }
    first = aggregate(OLD, updates)
    assert_model(first, composed(factors))
    then = aggregate(OLD, updates, AggregationPolicy(factors="act"))
    assert_model(then, averaged([(dense_of(updates[0]), 1.0), (dense_of(updates[1]), 3.0)]))
    assert not torch.allclose(first.tensors["c"], then.tensors["c"], atol=1e-2)
    for model in (first, then):
        assert model.kept["cp:2.0"].keys() == table.keys()


def test_averaged_factors_enter_with_their_devices_joint_weight() -> None:
    updates = [cp_update(1, 2), full_update(9, 5), cp_update(1, 3)]
    same = dense_of(updates[0])
    assert_model(aggregate(OLD, updates), averaged([(same, 5.0), (dense_of(updates[1]), 5.0)]))


def test_many_updates_of_two_layouts_merge() -> None:
    """Enough of them that every sum has carried, before and after it is laid out anew."""
    updates = [full_update(seed) for seed in range(40)]
    updates += [(low_rank_update, full_update)[seed % 2](seed) for seed in range(40, 120)]
    halves = [Aggregation(OLD, AggregationPolicy()) for _ in range(2)]
    for number, update in enumerate(updates):
        halves[number % 3 == 0].add(*update)
    halves[0].merge(halves[1])
    expected = averaged([(dense_of(update), 1.0) for update in updates])
    assert_model(halves[0].result(), expected)
