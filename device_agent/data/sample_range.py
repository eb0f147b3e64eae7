"""The range of a model's samples, from what a user writes or from a few real samples."""

import math
import tempfile
from pathlib import Path

import numpy as np

from device_agent.data.array_files import SAMPLES, as_array, read_arrays
from device_agent.data.data_checks import (
    check_count,
    check_finite,
    ignore_piece,
    wrong_sample_shape,
)
from device_agent.formats.input_range import InputRange, Interval, range_of
from profiles.errors import DataError, InputError

EXAMPLES = 2
"""The smallest number of real samples that show a range."""
LARGEST = 3.4e38


def parse_range(text: str) -> InputRange:
    """Read a range like 0:4 or -1.0:1.0. If both ends are whole numbers, all numbers are whole.

    Raises InputError unless the first end is below the second.
    """
    low, _, high = text.partition(":")
    try:
        try:
            return range_between(int(low), int(high))
        except ValueError:
            return range_between(float(low), float(high))
    except ValueError:
        raise InputError(
            "Invalid range {given!r}: write the smallest and the largest number of a sample, for "
            "example 0:4 for whole numbers or 0.0:1.0.",
            code="option.invalid-value",
            option="--input-range",
            given=text[:40],
        ) from None


def range_between(low: float, high: float) -> InputRange:
    """The range of numbers from `low` to `high`; they are whole if both are integers.

    Raises InputError unless `low` is below `high` and both are finite.
    """
    if not (-LARGEST <= low < high <= LARGEST):
        raise InputError(
            "The range of the samples goes from {low} to {high}. The first number must be below "
            "the second, and both must be finite float32 numbers.",
            code="option.invalid-value",
            option="--input-range",
            low=low,
            high=high,
        )
    whole = isinstance(low, int) and isinstance(high, int)
    return (Interval(low=float(low), high=float(high), whole=whole),)


def read_range(path: Path, sample_shape: tuple[int, ...]) -> InputRange:
    """Read a few real samples, and return the range of their numbers.

    Args:
        path: An .npz file with `x`, an .npy file, or a folder with x.npy.
        sample_shape: Shape of one sample.

    Raises:
        DataError: The file cannot be read, or does not hold at least two different samples of this
            shape.
    """
    with tempfile.TemporaryDirectory() as scratch:
        x = as_array(read_arrays(path, Path(scratch), (SAMPLES,))[SAMPLES])
        return range_of_examples(x, str(path), sample_shape)


def range_of_examples(
    x: np.ndarray, origin: str, sample_shape: tuple[int, ...] | None = None
) -> InputRange:
    """The range of the numbers in real samples `x`.

    Args:
        x: Samples (n, *sample_shape) of any type of real numbers.
        origin: Name of the samples for messages.
        sample_shape: Shape of one sample; None for any.

    Raises:
        DataError: `x` has another type or shape, numbers that are not finite, or too few different
            samples.
    """
    if x.dtype.kind not in "fiub":
        raise DataError(
            "{origin}: the samples must be numbers; their type is {x_type}. Convert them with "
            "numpy's astype.",
            code="data.wrong-type",
            x_type=str(x.dtype),
            origin=origin,
        )
    if x.ndim == 0 or sample_shape not in (None, x.shape[1:]):
        raise wrong_sample_shape(x, sample_shape or (), origin)
    check_count(len(x), origin, EXAMPLES)
    check_finite(x, "x", origin, ignore_piece)
    if not (x != x[:1]).any():
        raise DataError(
            "{origin}: all samples are equal, so they show no range. Give at least {needed} "
            "different samples.",
            code="data.too-few-samples",
            needed=EXAMPLES,
            origin=origin,
        )
    largest = float(np.abs(x.astype(np.float64)).max())
    if not math.isfinite(largest) or largest > LARGEST:
        raise DataError(
            "{origin}: the samples hold {number:g}, which is too large for float32. Scale them.",
            code="data.number-out-of-range",
            number=largest,
            origin=origin,
        )
    return range_of(x)
