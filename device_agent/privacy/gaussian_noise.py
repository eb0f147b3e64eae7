"""Gaussian noise from random bytes, which a cryptographic generator can provide."""

import math
import os
from collections.abc import Callable

import numpy as np

RandomBytes = Callable[[int], bytes]
"""Returns this number of random bytes."""
PIECE = 1 << 16
"""How many pairs of numbers are computed at a time."""


def secure_bytes(count: int) -> bytes:
    """Random bytes from the operating system's cryptographic generator."""
    return os.urandom(count)


def gaussian(shape: tuple[int, ...], random_bytes: RandomBytes) -> np.ndarray:
    """Independent standard normal numbers of `shape`, float64, by Box and Muller's formula.

    Each pair of numbers takes 16 random bytes:

        sqrt(-2 ln u) cos(2 pi v), sqrt(-2 ln u) sin(2 pi v)    with u in (0, 1], v in [0, 1)

    u and v have 53 bits, so no number is beyond 8.6.

    Examples:
        >>> gaussian((2, 3), np.random.default_rng(0).bytes).shape
        (2, 3)
    """
    count = math.prod(shape)
    numbers = np.empty(count + count % 2)
    for start in range(0, len(numbers), 2 * PIECE):
        pairs = min(PIECE, (len(numbers) - start) // 2)
        bits = np.frombuffer(random_bytes(16 * pairs), np.uint64).reshape(2, pairs) >> np.uint64(11)
        radius = np.sqrt(-2.0 * np.log((bits[0] + 1.0) * 2.0**-53))
        angle = bits[1] * (2.0**-52 * math.pi)
        numbers[start : start + pairs] = radius * np.cos(angle)
        numbers[start + pairs : start + 2 * pairs] = radius * np.sin(angle)
    return numbers[:count].reshape(shape)
