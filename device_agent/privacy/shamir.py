"""Shamir's secret sharing in GF(256): `threshold` shares give the secret, fewer give nothing.

Each byte of the secret is the constant term of a random polynomial. A share has the values of all
polynomials at one point. The field has the polynomial x^8 + x^4 + x^3 + x + 1, as in AES and in the
Internet draft "Threshold Secret Sharing" (draft-mcgrew-tss-03). A test uses the test vectors of the
draft.
"""

import secrets
from collections.abc import Mapping

import numpy as np

MOST_SHARES = 255
"""The points are the bytes from 1 on; the value at 0 is the secret."""


def _tables() -> tuple[np.ndarray, np.ndarray]:
    """The powers of the generator 3, twice in a row, and the logarithms to this base."""
    powers, logarithms, value = np.zeros(510, np.uint8), np.zeros(256, np.int64), 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value ^= (value << 1) ^ (0x11B if value & 0x80 else 0)
    return powers, logarithms


_POWERS, _LOGARITHMS = _tables()


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The products in the field, element by element."""
    product = _POWERS[_LOGARITHMS[a] + _LOGARITHMS[b]]
    return np.where((a == 0) | (b == 0), np.uint8(0), product)


def split_secret(secret: bytes, threshold: int, shares: int) -> list[bytes]:
    """Split `secret` into shares for the points 1, 2, ..., `shares`.

    Any `threshold` shares give the secret. Fewer shares reveal nothing about the secret.

    Examples:
        >>> parts = split_secret(b"secret", threshold=2, shares=3)
        >>> joined_secret({1: parts[0], 3: parts[2]})
        b'secret'
    """
    if not 1 <= threshold <= shares <= MOST_SHARES:
        raise ValueError(
            f"a secret has at most {MOST_SHARES} shares, and a threshold from 1 to their number; "
            f"{shares} shares and the threshold {threshold} were asked for"
        )
    rows = [secret, *(secrets.token_bytes(len(secret)) for _ in range(threshold - 1))]
    points = np.arange(1, shares + 1, dtype=np.uint8)[:, None]
    values: np.ndarray = np.zeros((shares, len(secret)), np.uint8)
    for row in reversed(rows):  # Horner's scheme
        values = _times(values, points) ^ np.frombuffer(row, np.uint8)
    return [value.tobytes() for value in values]


def joined_secret(shares: Mapping[int, bytes]) -> bytes:
    """The secret of `shares`, a mapping from points to shares.

    Fewer shares than the threshold give a wrong result.
    """
    points = np.array(list(shares), np.uint8)
    secret = np.zeros(len(next(iter(shares.values()))), np.uint8)
    for point, share in shares.items():
        others = points[points != point]
        # Lagrange at 0: the product of x / (x - own) over the other points. Minus is XOR.
        above = _LOGARITHMS[others].sum()
        below = _LOGARITHMS[others ^ np.uint8(point)].sum()
        factor = _POWERS[(above - below) % 255]
        secret ^= _times(np.frombuffer(share, np.uint8), np.full_like(secret, factor))
    return secret.tobytes()
