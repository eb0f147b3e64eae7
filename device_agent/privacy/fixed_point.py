"""Converts updates to whole numbers modulo 2^32: masks hide these completely and cancel exactly.

A device sends weight * change. The weight is in [0, 1], and each element of the change is clipped
to [-most_change, most_change]. For a group of n devices the step of the numbers is most_change /
levels with levels = (2^31 - 1) // n - 1, so the sum of n devices never overflows. Rounding is
stochastic: the mean of its error is zero, and each error is less than a step. So an element of the
sum has an error of less than n steps, which is n^2 * 4.7e-10 * most_change. For 46 devices, this is
at worst 1e-6 * most_change. The errors of devices are independent, so the typical error is sqrt(n)
/ 2.4 steps.

Counts are added up exactly: each count is a signed 64-bit number in four parts of 16 bits.
"""

from collections.abc import Sequence

import numpy as np

PARTS = 4
"""The elements that a count takes."""
_PART_BITS = 16


def levels(devices: int) -> int:
    """The number of steps from 0 to `most_change` in a group of `devices`."""
    return (2**31 - 1) // devices - 1


def quantised(
    change: np.ndarray, weight: float, most_change: float, devices: int, draw: np.random.Generator
) -> tuple[np.ndarray, int]:
    """Convert a device's change to whole numbers.

    Args:
        change: Shape (elements,): the trained numbers minus the received numbers.
        weight: From 0 to 1.
        most_change: The limit to which elements are clipped.
        devices: The size of the group.
        draw: The random generator for the rounding.

    Returns:
        The numbers, (elements,) in uint32, and the number of clipped elements.
    """
    scaled = change.astype(np.float64) / most_change
    clipped = int(np.count_nonzero(np.abs(scaled) > 1))
    np.clip(scaled, -1, 1, out=scaled)
    scaled *= weight * levels(devices)
    scaled += draw.random(len(scaled))
    np.floor(scaled, out=scaled)
    return scaled.astype(np.int64).astype(np.uint32), clipped


def weighted_sum(total: np.ndarray, most_change: float, devices: int) -> np.ndarray:
    """The sum of weight * change over the devices in float64, from the sum of the whole numbers."""
    return total.view(np.int32) * (most_change / levels(devices))


def encoded_counts(counts: Sequence[int]) -> np.ndarray:
    """The elements of exact counts: four uint32 elements for each count, which fits in int64."""
    whole = np.array(counts, np.int64).view(np.uint64)
    shifts = np.arange(PARTS, dtype=np.uint64) * np.uint64(_PART_BITS)
    return ((whole[:, None] >> shifts) & np.uint64(0xFFFF)).astype(np.uint32).ravel()


def decoded_counts(total: np.ndarray) -> list[int]:
    """Decode `total`, the sum of at most 65,536 results of `encoded_counts`.

    With more devices, the sum of a part of a count could overflow.
    """
    parts = total.reshape(-1, PARTS).astype(np.uint64)
    shifts = np.arange(PARTS, dtype=np.uint64) * np.uint64(_PART_BITS)
    whole = (parts << shifts).sum(axis=1, dtype=np.uint64)  # modulo 2^64
    return [int(count) for count in whole.view(np.int64)]
