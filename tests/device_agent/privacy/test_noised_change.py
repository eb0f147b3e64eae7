"""Changes with noise of their device: the clip holds after rounding, and sums have the noise."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.formats.protocol.secure_sums import SecureTerms, SumPrivacy
from device_agent.privacy.fixed_point import levels, weighted_sum
from device_agent.privacy.gaussian_noise import RandomBytes
from device_agent.privacy.noised_change import largest, noised_numbers
from refusals import refused


def terms_of(clip: float, noise: float, fewest: int = 3) -> SecureTerms:
    privacy = SumPrivacy(clip=clip, noise_multiplier=noise)
    return SecureTerms(fewest=fewest, most_change=1.0, most_samples=1, privacy=privacy)


def numbers_of(
    change: np.ndarray, terms: SecureTerms, devices: int, random_bytes: RandomBytes
) -> np.ndarray:
    """The numbers of a change that is in two tensors."""

    def parts() -> Iterator[np.ndarray]:
        yield from (change[:2], change[2:].reshape(1, -1))

    assert terms.privacy is not None
    return noised_numbers(parts, terms, terms.privacy, devices, random_bytes)


def no_noise(count: int) -> bytes:
    """The bytes of which `gaussian` makes zeros."""
    return b"\xff" * count


def most_noise(count: int) -> bytes:
    """The bytes of which `gaussian` makes its largest numbers."""
    return b"\0" * count


@given(
    clip=st.floats(1e-6, 1e6),
    noise=st.floats(1e-6, 1e2),
    devices=st.integers(3, 2000),
    size=st.floats(0, 1e9),
    seed=st.integers(0, 2**32),
)
def test_the_clip_holds_after_rounding(
    clip: float, noise: float, devices: int, size: float, seed: int
) -> None:
    terms, draw = terms_of(clip, noise), np.random.default_rng(seed)
    change = size * draw.standard_normal(7)
    came = weighted_sum(
        numbers_of(change, terms, devices, no_noise), largest(terms, devices), devices
    )
    step = largest(terms, devices) / levels(devices)
    assert np.linalg.norm(came) <= clip * (1 + 1e-12)
    exact = change * min(1.0, clip / max(float(np.linalg.norm(change)), 1e-300))
    np.testing.assert_allclose(came, exact, rtol=0, atol=(1 + math.sqrt(7)) * step + 1e-12 * clip)


@pytest.mark.parametrize(("devices", "fewest", "lost"), [(10, 3, 4), (5, 5, 0), (3, 3, 0)])
def test_a_sum_of_the_fewest_devices_has_the_promised_noise(
    devices: int, fewest: int, lost: int, seed: int
) -> None:
    clip, noise, size = 0.5, 2.0, 40_000
    terms, draw = terms_of(clip, noise, fewest), np.random.default_rng(seed)
    total, exact = np.zeros(size, np.uint32), np.zeros(size)
    for _ in range(devices - lost):
        change = draw.standard_normal(size)
        total += numbers_of(change, terms, devices, draw.bytes)
        exact += change * clip / np.linalg.norm(change)
    # The others of the fewest devices have the promised noise; the own noise is added.
    deviation = noise * clip * math.sqrt((devices - lost) / (devices - lost - 1))
    found = (weighted_sum(total, largest(terms, devices), devices) - exact) / deviation
    assert abs(found.mean()) < 6 / math.sqrt(size)
    assert abs(found.std() - 1) < 6 / math.sqrt(2 * size)
    assert abs((found**4).mean() - 3) < 6 * math.sqrt(96 / size)  # as of a Gaussian


def test_the_largest_noise_of_all_devices_does_not_overflow() -> None:
    devices, terms = 20, terms_of(1.0, 3.0)
    change = np.array([1e9, 0.0, 0.0, 0.0, 0.0])
    numbers = numbers_of(change, terms, devices, most_noise)
    total = sum((numbers for _ in range(devices)), np.zeros(5, np.uint32))
    whole = weighted_sum(total, largest(terms, devices), devices)
    one = weighted_sum(numbers, largest(terms, devices), devices)
    np.testing.assert_allclose(whole, devices * one, rtol=1e-12)
    assert one[0] > one[1] + 0.99


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e200])
def test_a_change_without_a_norm_is_not_sent(number: float) -> None:
    """The coordinator makes the received numbers: a NaN among them must not end the clip."""
    change = np.array([0.1, number, 0.0, 0.0, 0.0])
    with refused("trust.unclippable"), np.errstate(over="ignore"):
        numbers_of(change, terms_of(1.0, 1.0), 5, no_noise)


def test_a_clip_that_is_smaller_than_the_rounding_is_refused() -> None:
    with refused("trust.unclippable"):
        numbers_of(np.ones(1_000_000), terms_of(1.0, 1e6), 2000, no_noise)
