"""Sums the clipped gradients of samples, and adds noise: the private part of DP-SGD.

Let g_i be the gradient of sample i in a batch, as one vector over all tensors:

    mean = (sum_i g_i min(1, clip / ||g_i||) + noise_multiplier * clip * N(0, 1)) / batch_size

(Abadi et al. 2016, algorithm 1). `batch_size` is the expected size of a batch, which does not
depend on the samples.
"""

import math
from collections.abc import Mapping

import numpy as np

from device_agent.formats.manifest import SamplePrivacy
from device_agent.privacy.gaussian_noise import RandomBytes, gaussian
from profiles.errors import BundleError

PIECE = 1 << 16
"""How many numbers are squared or get noise at a time. Float32 sums of this many are accurate."""
ROUNDING = 1e-6
"""A clipped gradient is shorter than the clip by this share, because its numbers are rounded."""


def norm_of(gradients: Mapping[str, np.ndarray]) -> float:
    """The L2 norm of all numbers in the float32 `gradients`; inf or NaN if it is beyond float32.

    Examples:
        >>> norm_of({"w": np.float32([[3.0]]), "b": np.float32([4.0])})
        5.0
    """
    squares = 0.0
    for gradient in gradients.values():
        flat = gradient.reshape(-1)
        for start in range(0, len(flat), PIECE):
            piece = flat[start : start + PIECE]
            with np.errstate(over="ignore", invalid="ignore"):
                squares += float(np.dot(piece, piece))
    return math.sqrt(squares)


def add_clipped(
    sums: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray], clip: float
) -> None:
    """Add the `gradients` of a sample to `sums`, clipped to the L2 norm `clip`.

    If the norm is not finite, nothing is added, because the gradients cannot be clipped.

    Args:
        sums: Float32 arrays by name.
        gradients: Arrays of the same names, types and shapes. This function changes the arrays.
        clip: The largest norm.

    Raises:
        BundleError: A gradient has another type or shape, so its norm would not limit the sum.
    """
    for name, gradient in gradients.items():
        total = sums[name]
        if (gradient.dtype, gradient.shape) != (total.dtype, total.shape):
            # Do not name the actual type and shape: the coordinator gets this message, and they may
            # depend on a sample.
            raise BundleError(
                "The graph must return the gradient {name!r} as {wanted}, but the type or the "
                "shape differs. Nothing was sent. Ask the operator for another bundle.",
                code="bundle.wrong-gradient",
                name=name,
                wanted=f"{total.dtype} {list(total.shape)}",
            )
    norm = norm_of(gradients)
    if not math.isfinite(norm):
        return
    scale = np.float32(clip / norm * (1 - ROUNDING)) if norm > clip else None
    for name, gradient in gradients.items():
        if scale is not None:
            np.multiply(gradient, scale, out=gradient)
        sums[name][...] += gradient


def to_noised_mean(
    sums: Mapping[str, np.ndarray],
    terms: SamplePrivacy,
    batch_size: int,
    random_bytes: RandomBytes,
) -> None:
    """Replace `sums` by their noised mean, in place.

    Args:
        sums: The sums of clipped gradients, C-contiguous float32 arrays by name.
        terms: The clip and the noise multiplier.
        batch_size: The expected number of samples in a batch.
        random_bytes: The source of randomness for the noise.
    """
    deviation = terms.noise_multiplier * terms.clip
    for name in sorted(sums):
        flat = sums[name].reshape(-1)
        for start in range(0, len(flat), PIECE):
            piece = flat[start : start + PIECE]
            noise = gaussian(piece.shape, random_bytes)
            piece[...] = (piece + deviation * noise) / batch_size


def poisson_batch(samples: int, probability: float, random_bytes: RandomBytes) -> np.ndarray:
    """Draw a batch from `samples` samples: each is drawn independently with this probability.

    Returns the indices, ascending. The batch may be empty.
    """
    bits = np.frombuffer(random_bytes(8 * samples), np.uint64) >> np.uint64(11)
    return np.flatnonzero(bits * 2.0**-53 < probability)
