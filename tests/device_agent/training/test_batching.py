"""How samples form batches."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from device_agent.training.batching import batches
from oracles import batches_of


@given(
    count=st.integers(1, 300),
    size=st.integers(2, 40),
    order=st.none() | st.integers(0, 99),
)
def test_batches_cover_every_sample_once(count: int, size: int, order: int | None) -> None:
    shuffled = None if order is None else np.random.default_rng(order)
    parts = batches(count, size, shuffled)
    sizes = list(map(len, parts))
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert min(sizes) > 1 or count == 1
    assert all(length == size for length in sizes[:-1])
    assert sizes[-1] <= size + 1
    if order is None:
        assert np.concatenate(parts).tolist() == list(range(count))


@given(
    samples=st.integers(1, 300),
    size=st.integers(2, 40),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 9),
)
def test_the_order_is_the_documented_one(samples: int, size: int, seed: int, epoch: int) -> None:
    parts = batches(samples, size, np.random.default_rng([seed, epoch]))
    expected = batches_of(samples, size, seed, epoch)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


def test_batches_are_shuffled_by_their_seed() -> None:
    first, again, other = (
        np.concatenate(batches(50, 8, np.random.default_rng(seed))).tolist() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first != list(range(50))
