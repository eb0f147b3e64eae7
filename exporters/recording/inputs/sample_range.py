"""Reads the inputs of a model and their range from a user's text or from a few real samples."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from device_agent.data.array_files import SAMPLES, as_array, read_arrays
from device_agent.data.data_checks import (
    check_count,
    check_finite,
    ignore_piece,
    wrong_sample_shape,
)
from device_agent.data.packed_arrays import array_names, packed_array
from device_agent.formats.input_range import InputRange, Interval, range_of
from device_agent.formats.manifest import Dtype, Part
from profiles.errors import DataError, InputError


class Inputs(NamedTuple):
    """A user's description of the samples of a model.

    Attributes:
        range: The range of the numbers in samples. Empty if it is not known.
        parts: The inputs that are packed into a sample. Empty if a sample is one array.
    """

    range: InputRange = ()
    parts: tuple[Part, ...] = ()


NO_INPUTS = Inputs()
EXAMPLES = 2
"""The smallest number of real samples that show a range."""
LARGEST = 3.4e38


def parse_range(text: str) -> InputRange:
    """Read a range like 0:4 or -1.0:1.0. If both ends are whole, the numbers in it are whole.

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
    """The range of numbers from `low` to `high`. If both are integers, all numbers are whole.

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


def parse_input(text: str) -> Part:
    """Read an input like image:3,32,32 or word:20:int64 or user:int64 (one id for each sample).

    Raises InputError if `text` is not an input.
    """
    name, *rest = text.split(":")
    dtype: Dtype = "float32"
    if rest and rest[-1] in ("float32", "int64"):
        dtype = "int64" if rest.pop() == "int64" else "float32"
    try:
        shape = tuple(int(size) for size in rest[0].split(",")) if rest and rest[0] else ()
    except ValueError:
        shape = (0,)
    if not name.isidentifier() or len(rest) > 1 or any(size < 1 for size in shape):
        raise InputError(
            "Invalid input {given!r}: write NAME:SHAPE for numbers or NAME:SHAPE:int64 for ids, "
            "for example image:3,32,32 or words:20:int64. NAME:int64 is one id for each sample.",
            code="option.invalid-value",
            option="--input",
            given=text[:60],
        )
    return Part(name=name, shape=shape, dtype=dtype)


def parse_inputs(texts: Sequence[str]) -> tuple[Part, ...]:
    """Read several inputs, see `parse_input`. Raises InputError if two have the same name."""
    parts = tuple(map(parse_input, texts))
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                "The input {name!r} is given twice. Give each input once.",
                code="option.invalid-value",
                option="--input",
                name=name,
            )
    return parts


def read_range(path: Path, sample_shape: tuple[int, ...], parts: Sequence[Part] = ()) -> InputRange:
    """Read a few real samples, and return the range of their numbers.

    Args:
        path: An .npz file with `x`, an .npy file, or a folder with x.npy. If `parts` are given,
            there is an array `x_NAME` for each part.
        sample_shape: Shape of one sample.
        parts: The inputs that are packed into a sample.

    Raises:
        DataError: The file cannot be read, or does not contain at least two different samples of
            this shape.
    """
    with tempfile.TemporaryDirectory() as scratch:
        arrays = read_arrays(path, Path(scratch), array_names(SAMPLES, parts))
        x = as_array(packed_array(SAMPLES, arrays, parts, str(path)))
        return range_of_examples(x, str(path), sample_shape)


def range_of_examples(
    x: np.ndarray, origin: str, sample_shape: tuple[int, ...] | None = None
) -> InputRange:
    """The range of the numbers in real samples `x`.

    Args:
        x: Samples (n, *sample_shape) of any type of real numbers.
        origin: Name of the samples for messages.
        sample_shape: Shape of one sample. None allows any shape.

    Raises:
        DataError: `x` has another type or shape, contains numbers that are not finite, or has too
            few different samples.
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
            "{origin}: all samples are equal, so the range of their numbers is unknown. Give at "
            "least {needed} different samples.",
            code="data.too-few-samples",
            needed=EXAMPLES,
            origin=origin,
        )
    largest = float(np.abs(x.astype(np.float64)).max())
    if not math.isfinite(largest) or largest > LARGEST:
        raise DataError(
            "{origin}: the samples contain {number:g}, which is too large for float32. Scale them.",
            code="data.number-out-of-range",
            number=largest,
            origin=origin,
        )
    return range_of(x)
