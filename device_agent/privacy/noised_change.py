"""A device's change for a secure sum with differential privacy: clipped, and with added noise.

Each device adds noise, so neither the coordinator nor another device sees a sum without noise. Let
z be the noise multiplier, and t the smallest number of devices in a sum of the group. Each device
adds Gaussian noise with the standard deviation z * clip / sqrt(t - 1) to each number. A device
knows its own noise and could subtract it. So only the noise of all other devices counts: the
standard deviation of this noise in the sum is at least z * clip.

The numbers of a sum are whole (`fixed_point.py`). The change is rounded before the noise is added,
and clipped so that its norm is at most `clip` after rounding. The noise is also rounded. Its
standard deviation is hundreds of steps or more, so sums of rounded noise hardly differ from
Gaussian noise (Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism", 2021).
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from device_agent.formats.protocol.secure_sums import SecureTerms, SumPrivacy
from device_agent.privacy.fixed_point import levels, quantised
from device_agent.privacy.gaussian_noise import RandomBytes, gaussian
from device_agent.privacy.secure_group import threshold
from profiles.errors import TrustError

FARTHEST = 9.0
"""No noise is beyond this many standard deviations: `gaussian` ends at 8.6."""


def own_deviation(terms: SecureTerms, privacy: SumPrivacy, devices: int) -> float:
    """The standard deviation of the noise that each of `devices` adds to a number."""
    fewest = max(terms.fewest, threshold(devices))
    return privacy.noise_multiplier * privacy.clip / math.sqrt(fewest - 1)


def largest(terms: SecureTerms, devices: int) -> float:
    """The largest number that a device can add to the sum of `devices`."""
    if terms.privacy is None:
        return terms.most_change
    return terms.privacy.clip + FARTHEST * own_deviation(terms, terms.privacy, devices)


def noised_numbers(
    changes: Callable[[], Iterator[np.ndarray]],
    terms: SecureTerms,
    privacy: SumPrivacy,
    devices: int,
    random_bytes: RandomBytes,
) -> np.ndarray:
    """The clipped changes of a device plus its noise, as whole numbers modulo 2^32.

    Args:
        changes: Yields the trained numbers minus the received numbers, one tensor after another, in
            the order of the sum. This function is called twice, so that only one tensor at a time
            is in memory.
        terms: The terms of the sum.
        privacy: The clip and the noise of the sum.
        devices: The size of the group.
        random_bytes: A cryptographic generator, for the rounding and the noise.

    Returns:
        Shape (elements,), uint32.

    Raises:
        TrustError: A number is not finite, or the steps of rounding are too large for the clip.
    """
    most = largest(terms, devices)
    step = most / levels(devices)
    deviation = own_deviation(terms, privacy, devices) / step
    elements, squares = 0, 0.0
    for change in changes():
        elements += change.size
        squares += float(np.square(change).sum())
    norm = math.sqrt(squares)
    # Rounding moves each number by less than a step.
    longest = privacy.clip - step * math.sqrt(elements)
    # The received numbers come from the coordinator: a number that is not finite cannot be clipped.
    if not math.isfinite(norm) or longest <= 0:
        raise TrustError(
            "The change of this device has the norm {norm:g}, and cannot be shortened to {clip:g}, "
            "of which rounding needs {rounding:g}. Nothing was sent. Ask the operator.",
            code="trust.unclippable",
            norm=norm,
            rounding=privacy.clip - longest,
            clip=privacy.clip,
        )
    scale = min(1.0, longest / norm) if norm > 0 else 1.0
    draw = np.random.default_rng(int.from_bytes(random_bytes(16), "little"))
    numbers, start = np.empty(elements, np.uint32), 0
    for change in changes():
        part, _ = quantised(change.ravel() * scale, 1.0, most, devices, draw)
        noise = np.rint(deviation * gaussian((part.size,), random_bytes)).astype(np.int64)
        numbers[start : start + part.size] = part + noise.astype(np.uint32)
        start += part.size
    return numbers
