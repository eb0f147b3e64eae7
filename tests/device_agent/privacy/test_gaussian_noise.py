"""Noise is normal, and independent from number to number."""

import numpy as np
import pytest
from scipy import stats

from device_agent.privacy.gaussian_noise import PIECE, RandomBytes, gaussian, secure_bytes


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_the_numbers_are_normal_and_independent(source: str, seed: int) -> None:
    """The bounds fail one correct run in 10^6."""
    random_bytes: RandomBytes = np.random.default_rng(seed).bytes
    count = 2 * PIECE + 70_001
    numbers = gaussian((count,), secure_bytes if source == "secure" else random_bytes)
    assert stats.kstest(numbers, "norm").pvalue > 2e-7
    for lag in (1, 2, PIECE, count // 2):  # a normal number divided by sqrt(count - lag)
        assert abs(np.mean(numbers[lag:] * numbers[:-lag])) < 5.2 / np.sqrt(count - lag)
    assert len(np.unique(numbers)) == count


def test_the_ends_of_the_random_bits() -> None:
    """u = 2^-53 gives the largest number, and u = 1 gives 0: no number is infinite."""
    assert gaussian((2,), bytes) == pytest.approx([np.sqrt(106 * np.log(2)), 0.0])
    assert gaussian((1, 1), lambda count: b"\xff" * count) == pytest.approx(0.0, abs=1e-7)
    assert gaussian((), bytes).shape == ()
