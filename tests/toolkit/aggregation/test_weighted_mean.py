"""The streaming mean's laws."""

from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.aggregation.weighted_mean import Mean

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


def assert_same(mean: Mean, other: Mean) -> None:
    left, right = mean.result(), other.result()
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


def test_a_thousand_updates_round_like_one() -> None:
    draw = np.random.default_rng(5)
    values = draw.normal(1.0, 0.1, (1000, 50)).astype(np.float32)
    mean = Mean()
    for value in values:
        mean.add({"a": torch.from_numpy(value)}, 100.0)
    expected = values.astype(np.float64).mean(0)
    # One float32 addition after the other is off by 1e-6 and more.
    np.testing.assert_allclose(mean.result()["a"].numpy(), expected, rtol=2e-7)
