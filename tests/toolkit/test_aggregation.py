"""The streaming mean's laws, and what aggregation refuses."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device_agent.manifest import FileEntry, TensorEntry
from device_agent.update import UpdateRecord
from profiles.errors import UpdateError
from toolkit.aggregation import Received, aggregate
from toolkit.mean import Mean
from toolkit.weights import GlobalModel

NAMES = "abc"
Updates = list[tuple[frozenset[str], float, int]]

updates = st.lists(
    st.tuples(
        st.frozensets(st.sampled_from(NAMES), min_size=1),
        st.integers(1, 10_000).map(float),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=6,
)


def tensors(names: frozenset[str], seed: int) -> dict[str, torch.Tensor]:
    draw = np.random.default_rng(seed)
    values = {name: draw.normal(size=(3, 2)).astype(np.float32) for name in NAMES}
    return {name: torch.from_numpy(values[name]) for name in names}


def mean_of(parts: Sequence[tuple[frozenset[str], float, int]]) -> Mean:
    mean = Mean()
    for names, weight, seed in parts:
        mean.add(tensors(names, seed), weight)
    return mean


def assert_same(one: Mean, other: Mean) -> None:
    left, right = one.result(), other.result()
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-6, atol=1e-6)


@given(updates)
def test_mean_is_numpys_weighted_average(parts: Updates) -> None:
    result = mean_of(parts).result()
    for name in NAMES:
        held = [(tensors(own, seed)[name].numpy(), w) for own, w, seed in parts if name in own]
        assert (name in result) == bool(held)
        if held:
            values, weights = zip(*held, strict=True)
            expected = np.average(np.stack(values).astype(np.float64), axis=0, weights=weights)
            np.testing.assert_allclose(result[name].numpy(), expected, rtol=1e-6, atol=1e-6)


@given(updates, st.randoms(use_true_random=False))
def test_order_does_not_matter(parts: Updates, random: Random) -> None:
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert_same(mean_of(parts), mean_of(shuffled))


@given(updates, st.integers(0, 6))
def test_merging_two_means_equals_adding_everything_to_one(parts: Updates, cut: int) -> None:
    left, right = mean_of(parts[:cut]), mean_of(parts[cut:])
    untouched = mean_of(parts[cut:])
    left.merge(right)
    assert_same(left, mean_of(parts))
    left.add(tensors(frozenset(NAMES), 1), 5.0)
    assert_same(right, untouched)


@given(updates)
def test_adding_leaves_what_was_added_alone(parts: Updates) -> None:
    given_tensors = tensors(frozenset(NAMES), 7)
    mean = Mean()
    mean.add(given_tensors, 1.0)
    for names, weight, seed in parts:
        mean.add(tensors(names, seed), weight)
    for name, value in tensors(frozenset(NAMES), 7).items():
        assert torch.equal(given_tensors[name], value)


def received(
    stands_for: str, value: np.ndarray, samples: int = 4, submodel: str = "full"
) -> Received:
    entry = TensorEntry(
        name=stands_for,
        role="parameter",
        dtype="float32",
        shape=value.shape,
        stands_for=stands_for,
    )
    record = UpdateRecord(
        bundle="b",
        base="g",
        submodel=submodel,
        samples=samples,
        steps=1,
        loss_first=1.0,
        loss_last=1.0,
        tensors=(entry,),
        file=FileEntry(size=0, sha256=""),
    )
    return record, {stands_for: value}


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
    ("update", "words"),
    [
        (received("x", np.zeros(2, np.float32)), "trains 'x', which the global"),
        (received("w", np.zeros((3, 2), np.float32)), r"gives 'w' the shape \(3, 2\)"),
        (received("w", np.zeros((2, 3), np.float32), samples=0), "0 samples has no weight"),
    ],
)
def test_updates_that_do_not_fit_are_refused(update: Received, words: str) -> None:
    with pytest.raises(UpdateError, match=words):
        aggregate(MODEL, [received("w", np.ones((2, 3), np.float32)), update])
    assert torch.equal(MODEL.tensors["w"], torch.zeros(2, 3))


def test_nothing_to_aggregate_is_refused() -> None:
    with pytest.raises(UpdateError, match="no update to aggregate"):
        aggregate(MODEL, [])
