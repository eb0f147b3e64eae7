"""Weights as 8-bit integers with one scale for each output channel.

    w[i] = scale[i] * q[i],   -127 <= q[i] <= 127,   scale[i] = max |w[i]| / 127

Here i counts along the first axis of the weight. The scale is rounded up to 16 significant bits. So
the product of the scale and a 7-bit integer is exact in float32, and a graph, PyTorch and any other
program compute bit-identical weights.
"""

import math

import numpy as np
import torch
from torch import Tensor

LARGEST = np.float32(127)
UNUSED_BITS = np.uint32(0xFF)
"""The bits of a float32 number that are zero in a scale: the last 8 of 24."""


def to_int8(weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The integers and the scales of a float32 weight of shape (m, ...).

    Returns:
        int8 (m, ...) and float32 (m, 1, ...).

    Examples:
        >>> q, scale = to_int8(torch.tensor([[1.0, -0.5], [0.0, 0.0]]))
        >>> q.tolist()
        [[127, -63], [0, 0]]
    """
    values = weight.detach().numpy()
    largest = np.abs(values).reshape(len(values), -1).max(1)
    bits = (largest / LARGEST).view(np.uint32)
    scale = ((bits + UNUSED_BITS) & ~UNUSED_BITS).view(np.float32)
    scale = scale.reshape(-1, *[1] * (values.ndim - 1))
    # The scale of zeros is 0; they stay zeros.
    q = np.rint(values / np.where(scale > 0, scale, LARGEST))
    return q.astype(np.int8), scale


def rounded(weight: Tensor) -> Tensor:
    """The float32 weight that the integers and scales of `weight` represent.

    If the result is rounded again, it does not change.
    """
    q, scale = to_int8(weight)
    return torch.from_numpy(q * scale)


def int8_bytes(shape: tuple[int, ...]) -> int:
    """The number of bytes that a weight of `shape` takes as 8-bit integers and scales."""
    return math.prod(shape) + 4 * shape[0]
