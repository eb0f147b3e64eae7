import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from device_agent.privacy.fixed_point import (
    decoded_counts,
    encoded_counts,
    levels,
    quantised,
    weighted_sum,
)

CLIP = 8.0


def test_the_sum_has_the_stated_error() -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    draw = np.random.default_rng(seed)
    devices = 46
    changes = draw.uniform(-CLIP, CLIP, (devices, 5000))
    changes[:, 0], changes[:, 1] = CLIP, -CLIP  # the largest sums do not overflow
    weights = draw.uniform(0, 1, devices)
    weights[:20] = 1
    total = np.zeros(5000, np.uint32)
    for change, weight in zip(changes, weights, strict=True):
        numbers, clipped = quantised(change, weight, CLIP, devices, draw)
        assert not clipped
        total += numbers
    error = weighted_sum(total, CLIP, devices) - weights @ changes
    assert np.abs(error).max() < devices * CLIP / levels(devices) < 1e-6 * CLIP, seed
    # Without bias: the mean over 5000 elements is far below the error of one.
    assert abs(error.mean()) < 0.1 * error.std(), seed


def test_larger_changes_are_clipped_and_counted() -> None:
    draw = np.random.default_rng(0)
    numbers, clipped = quantised(np.array([9.0, -20.0, 8.0, 1.0]), 0.5, CLIP, 4, draw)
    assert clipped == 2
    found = weighted_sum(numbers, CLIP, 4)
    assert np.allclose(found, [4, -4, 4, 0.5], atol=CLIP / levels(4))


def test_rounding_repeats_with_its_seed() -> None:
    change = np.random.default_rng(1).normal(size=100)
    first, again, other = (
        quantised(change, 0.3, CLIP, 5, np.random.default_rng(seed))[0] for seed in (7, 7, 8)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@given(
    st.lists(
        st.tuples(st.integers(-(2**40), 2**40), st.integers(0, 10**12)), min_size=1, max_size=50
    )
)
def test_counts_are_exact(counts: list[tuple[int, int]]) -> None:
    total = np.zeros(8, np.uint32)
    for own in counts:
        total += encoded_counts(own)
    assert decoded_counts(total) == [sum(column) for column in zip(*counts, strict=True)]
