"""Clipped sums of gradients, and random batches."""

import math

import numpy as np
import pytest

from device_agent.formats.manifest import SamplePrivacy
from device_agent.privacy.sample_gradients import (
    PIECE,
    add_clipped,
    norm_of,
    poisson_batch,
    to_noised_mean,
)
from refusals import refused

SHAPES = {"w": (3, PIECE // 2 + 7), "b": (5,)}


def gradients(draw: np.random.Generator, size: float) -> dict[str, np.ndarray]:
    made = {name: draw.normal(size=shape) for name, shape in SHAPES.items()}
    norm = math.sqrt(sum(float(np.square(value).sum()) for value in made.values()))
    return {name: (value * size / norm).astype(np.float32) for name, value in made.items()}


def test_each_gradient_is_clipped_over_all_tensors_together(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for size, clip in ((3.0, 0.25), (0.2, 0.25), (1e10, 1e-3)):
        given = gradients(draw, size)
        before = {name: value.astype(np.float64) for name, value in given.items()}
        sums = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        add_clipped(sums, given, clip)
        assert norm_of(sums) <= clip or size < clip
        for name, value in before.items():
            wanted = value * min(1.0, clip / size)
            np.testing.assert_allclose(sums[name], wanted, rtol=5e-6, atol=1e-12 * clip)


def test_gradients_that_cannot_be_clipped_add_nothing() -> None:
    """A graph could hide a sample beside one number that makes the norm useless."""
    for number in (math.nan, math.inf, 1e30):
        sums = {"w": np.zeros(3, np.float32)}
        add_clipped(sums, {"w": np.float32([number, 500.0, -900.0])}, 1.0)
        assert sums["w"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "gradient",
    [
        np.full(3, 2**32),  # its square is 0 in 64 bits
        np.full(3, True),
        np.float32([900.0]),  # would be added three times
        np.float32(900.0),
    ],
)
def test_gradients_of_another_type_or_shape_are_refused(gradient: np.ndarray) -> None:
    sums = {"w": np.zeros(3, np.float32)}
    with refused("bundle.wrong-gradient", name="w", wanted="float32 [3]"):
        add_clipped(sums, {"w": gradient}, 1.0)
    assert sums["w"].tolist() == [0.0, 0.0, 0.0]


def test_the_noise_has_the_stated_deviation(seed: int) -> None:
    """Bounds of five standard deviations fail one correct run in 10^6."""
    terms = SamplePrivacy(clip=0.5, noise_multiplier=3.0, delta=1e-5)
    sums = {name: np.full(shape, 8.0, np.float32) for name, shape in SHAPES.items()}
    to_noised_mean(sums, terms, 4, np.random.default_rng(seed).bytes)
    noise = np.concatenate([(value.reshape(-1) - 2.0) / (1.5 / 4) for value in sums.values()])
    count = len(noise)
    assert abs(noise.mean()) < 5 / math.sqrt(count)
    assert abs(np.square(noise).mean() - 1) < 5 * math.sqrt(2 / count)
    pairs = np.mean(noise[:-1] * noise[1:])  # independent
    assert abs(pairs) < 5 / math.sqrt(count)


def test_batches_have_each_sample_with_the_same_probability(seed: int) -> None:
    """Bounds of five standard deviations fail one correct run in 10^6."""
    stream, draws = np.random.default_rng(seed).bytes, 4000
    batches = [poisson_batch(10, 0.3, stream) for _ in range(draws)]
    counts = np.bincount(np.concatenate(batches), minlength=10)
    assert np.abs(counts - 0.3 * draws).max() < 5 * math.sqrt(draws * 0.21)
    sizes = np.array([len(batch) for batch in batches])  # independent: a binomial variance
    assert abs(sizes.var() - 2.1) < 0.35
    assert poisson_batch(7, 1.0, stream).tolist() == list(range(7))
