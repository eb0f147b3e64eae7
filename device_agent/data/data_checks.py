"""Checks of local data against the model: types, shapes and the range of every value.

The data may be larger than memory, so values are checked piece by piece.
"""

import math
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import numpy as np

from device_agent.data.array_files import row_slices
from device_agent.formats.label_rule import IGNORED, LabelRule
from device_agent.formats.manifest import Dtype
from profiles.errors import DataError
from profiles.text_formatting import counted, did_you_mean

MIN_SAMPLES = 2
"""Smallest number of samples to train on: batch normalisation cannot train on one sample."""

SAMPLE_TYPES, LABEL_TYPES = ("float32", "int64", "int32"), ("int64", "float32")
"""All types of samples and labels that a bundle can use."""

OnPiece = Callable[[np.ndarray], object]
"""Called with each piece of the data after the piece was checked."""


def ignore_piece(piece: np.ndarray) -> None:
    """Do nothing with the piece."""


def check_types(
    x_type: np.dtype,
    y_type: np.dtype,
    shapes: tuple[tuple[int, ...], ...],
    origin: str,
    names: tuple[str, str] = ("x", "y"),
) -> None:
    """Check types and shapes of data before the bundle is known.

    Args:
        x_type: Type of the samples.
        y_type: Type of the labels.
        shapes: Shapes of the samples and of the labels.
        origin: Name of the data for the error message.
        names: Names of the arrays.

    Raises:
        DataError: No bundle could be trained on such data.
    """
    if str(x_type) not in SAMPLE_TYPES or str(y_type) not in LABEL_TYPES:
        raise DataError(
            "{origin}: {x} must be {sample_types} and {y} {label_types}; they are {x_type} and "
            "{y_type}. Convert them with numpy's astype.",
            code="data.wrong-type",
            x_type=str(x_type),
            y_type=str(y_type),
            origin=origin,
            x=names[0],
            y=names[1],
            sample_types=" or ".join(SAMPLE_TYPES),
            label_types=" or ".join(LABEL_TYPES),
        )
    x_shape, y_shape = shapes
    if not x_shape or x_shape[:1] != y_shape[:1]:
        raise DataError(
            "{origin}: {x} and {y} must contain the same number of samples; they are {x_shape} and "
            "{y_shape}.",
            code="data.wrong-shape",
            x_shape=x_shape,
            y_shape=y_shape,
            origin=origin,
            x=names[0],
            y=names[1],
        )
    check_count(x_shape[0], origin, MIN_SAMPLES)


def check_arrays(
    x: np.ndarray,
    y: np.ndarray,
    sample_shape: tuple[int, ...],
    labels: LabelRule,
    origin: str,
    dtype: Dtype = "float32",
    limit: int | None = None,
    least: int = MIN_SAMPLES,
    on_piece: OnPiece = ignore_piece,
) -> tuple[str, ...]:
    """Check that samples and labels fit a model.

    Args:
        x: Samples, shape (n, *sample_shape).
        y: Labels, shape (n, *labels.shape).
        sample_shape: Shape of one sample.
        labels: The labels that the model takes.
        origin: Name of the data for messages.
        dtype: Required type of the samples.
        limit: All integers in `x` must be below this number.
        least: Smallest number of samples.
        on_piece: Called with each piece of the data that passed the checks.

    Returns:
        Remarks about the data that are not errors.

    Raises:
        DataError: Types, shapes, the number of samples or a value do not fit.
    """
    if x.dtype != dtype or y.dtype != labels.dtype:
        advice = f"Convert them: x.astype({dtype!r}), y.astype({labels.dtype!r})."
        # Do not convert: a conversion would hide that the data belong to another kind of task.
        if {str(y.dtype), labels.dtype} == {"int64", "float32"}:
            advice = "Classes are int64; float32 is for a regression with the loss mse."
        raise DataError(
            "{origin}: x must be {dtype} and y {label_dtype}; they are {x_type} and {y_type}. "
            "{advice}",
            code="data.wrong-type",
            x_type=str(x.dtype),
            y_type=str(y.dtype),
            origin=origin,
            dtype=dtype,
            label_dtype=labels.dtype,
            advice=advice,
        )
    fitting = y.ndim > 0 and x.shape == (len(y), *sample_shape)
    if not fitting or labels.shape not in (None, y.shape[1:]):
        expected = "(n, ...)" if labels.shape is None else batch_shape(labels.shape)
        raise DataError(
            "{origin}: x must be {sample_shape} and y {expected}; they are {x_shape} and "
            "{y_shape}.{advice}",
            code="data.wrong-shape",
            x_shape=x.shape,
            y_shape=y.shape,
            origin=origin,
            sample_shape=batch_shape(sample_shape),
            expected=expected,
            advice=shape_advice(x, "x", sample_shape) + shape_advice(y, "y", labels.shape),
        )
    check_count(len(y), origin, least)
    remarks: tuple[str, ...] = ()
    if labels.dtype == "int64":
        remarks = check_classes(y, labels, origin, on_piece)
    else:
        check_finite(y, "y", origin, on_piece)
    _check_values(x, origin, dtype, limit, on_piece)
    return remarks


def check_samples(
    x: np.ndarray,
    sample_shape: tuple[int, ...],
    origin: str,
    dtype: Dtype = "float32",
    limit: int | None = None,
) -> None:
    """Check that samples without labels fit a model. `check_arrays` describes the arguments.

    Raises:
        DataError: The type, the shape, the number of samples or a value does not fit the model.
    """
    if x.dtype != dtype:
        raise DataError(
            "{origin}: x must be {dtype}; it is {x_type}. Convert it: x.astype({dtype!r}). Prepare "
            "samples as for the training.",
            code="data.wrong-type",
            x_type=str(x.dtype),
            origin=origin,
            dtype=dtype,
        )
    if x.ndim == 0 or x.shape[1:] != sample_shape:
        raise wrong_sample_shape(x, sample_shape, origin)
    check_count(len(x), origin, least=1)
    _check_values(x, origin, dtype, limit, ignore_piece)


def wrong_sample_shape(x: np.ndarray, sample_shape: tuple[int, ...], origin: str) -> DataError:
    """The error for unlabelled samples `x` whose shape is not `sample_shape`."""
    advice = shape_advice(x, "x", sample_shape)
    if x.shape == sample_shape:
        advice = " x[None] is a batch of this single sample."
    return DataError(
        "{origin}: x must be {sample_shape}; it is {x_shape}.{advice}",
        code="data.wrong-shape",
        x_shape=x.shape,
        origin=origin,
        sample_shape=batch_shape(sample_shape),
        advice=advice,
    )


def _check_values(
    x: np.ndarray, origin: str, dtype: Dtype, limit: int | None, on_piece: OnPiece
) -> None:
    """Raise DataError if a number in `x` is not finite or is outside the model's range."""
    if dtype == "int64":
        check_integers(x, limit, origin, on_piece)
    else:
        check_finite(x, "x", origin, on_piece)


def shape_advice(array: np.ndarray, name: str, shape: tuple[int, ...] | None) -> str:
    """Suggest how to bring each sample or label into `shape`; empty if this is unclear.

    The text begins with a space. Transposing is tried before reshaping: if the axes are in another
    order, a reshape would also succeed, but with wrong samples.
    """
    if shape is None or array.ndim < 1 or array.shape[1:] == shape:
        return ""
    axes = range(1, array.ndim)
    # Channels last is the most frequent order. If h = w, other orders also have this shape.
    for order in ((array.ndim - 1, *axes[:-1]), (*axes[1:], 1), *permutations(axes)):
        if axes and tuple(array.shape[axis] for axis in order) == shape:
            return f" {name}.transpose{(0, *order)} has this shape."
    if len(array) and array.size == len(array) * math.prod(shape):
        return f" {name}.reshape{(-1, *shape)} has this shape."
    return ""


def check_count(samples: int, origin: str, least: int) -> None:
    """Raise DataError if there are fewer than `least` samples."""
    if samples < least:
        raise DataError(
            "{origin} contains {counted}. Give at least {needed}.",
            code="data.too-few-samples",
            samples=samples,
            needed=least,
            origin=origin,
            counted=counted(samples, "sample"),
        )


def batch_shape(shape: tuple[int, ...]) -> str:
    """The shape of a batch of samples with this `shape`, as text."""
    return f"(n, {', '.join(map(str, shape))})" if shape else "(n,)"


def check_finite(array: np.ndarray, name: str, origin: str, on_piece: OnPiece) -> None:
    """Raise DataError if `array` contains a number that is not finite."""
    for rows in row_slices(array):
        # `on_piece` computes a digest, which must not depend on the memory layout.
        piece = np.ascontiguousarray(array[rows])
        if not (finite := np.isfinite(piece)).all():
            index = tuple(int(n) for n in np.argwhere(~finite)[0])
            row = rows.start + index[0]
            raise DataError(
                "{origin}: {array} contains a number that is not finite, {number} in sample "
                "{sample} (counted from 0). Correct or remove the sample.",
                code="data.not-finite",
                array=name,
                sample=row,
                number=str(piece[index]),
                origin=origin,
            )
        on_piece(piece)


def value_range(
    array: np.ndarray, on_piece: OnPiece, ignored: int | None = None
) -> tuple[int, int] | None:
    """Find the smallest and largest integer in `array` that is not `ignored`.

    Returns None if all integers are `ignored`. `on_piece` is called with each piece of the array.
    """
    ends = []
    for rows in row_slices(array):
        piece = np.ascontiguousarray(array[rows])
        counted = piece if ignored is None else piece[piece != ignored]
        if counted.size:
            ends += [int(counted.min()), int(counted.max())]
        on_piece(piece)
    return (min(ends), max(ends)) if ends else None


def check_classes(
    y: np.ndarray, labels: LabelRule, origin: str, on_piece: OnPiece = ignore_piece
) -> tuple[str, ...]:
    """Check the labels of a classification.

    Args:
        y: Classes, shape (n, *labels.shape). If a sample has several labels, some may be IGNORED.
        labels: The labels that the model takes.
        origin: Name of the data for messages.
        on_piece: Called with each piece of the labels.

    Returns:
        A remark if all labels are of one class. This is not an error, because the other classes may
        occur on other devices of the fleet.

    Raises:
        DataError: A label is outside the model's classes, all labels are IGNORED, or the labels of
            a sample are not a sequence (see `check_sequences`).
    """
    highest = labels.highest
    ends = value_range(y, on_piece, IGNORED if y.ndim > 1 else None)
    if ends is None:
        raise DataError(
            "{origin}: all labels in y are {ignored}, the label of ignored positions. Give "
            "samples with labels.",
            code="data.no-labels",
            origin=origin,
            ignored=IGNORED,
        )
    low, high = ends
    if low < 0 or (highest is not None and high > highest):
        wrong = low if low < 0 else high
        known = "0 and above" if highest is None else f"0 to {highest}"
        advice = "Correct the labels"
        if labels.independent:
            advice += ": each is 1 for yes or 0 for no"
        elif low >= 0:
            advice += ", or use a model with more classes"
        raise DataError(
            "{origin}: the label {label} is outside the model's classes {known}. {advice}.",
            code="data.label-out-of-range",
            label=wrong,
            highest=highest,
            origin=origin,
            known=known,
            advice=advice,
        )
    if labels.sequence and y.ndim == 2:
        check_sequences(y, origin)
    if low < high:
        return ()
    what = "sample has" if y.ndim == 1 else "label that is not ignored is"
    return (
        f"{origin}: every {what} the class {low}. The model learns nothing about the other "
        "classes from these data.",
    )


def check_sequences(y: np.ndarray, origin: str) -> None:
    """Raise DataError unless each row of `y` is a sequence without 0, then only IGNORED."""
    for rows in row_slices(y):
        piece = y[rows]
        late = (piece[:, 1:] != IGNORED) & (piece[:, :-1] == IGNORED)
        wrong = (piece == 0).any(1) | late.any(1)
        if wrong.any():
            row = rows.start + int(wrong.argmax())
            raise DataError(
                "{origin}: with the loss ctc, the labels of a sample must be classes other than 0 "
                "(the blank), padded at the end with {ignored}. Sample {sample} (counted from 0) "
                "breaks this rule.",
                code="data.not-a-sequence",
                sample=row,
                origin=origin,
                ignored=IGNORED,
            )


def check_integers(
    x: np.ndarray, limit: int | None, origin: str, on_piece: OnPiece = ignore_piece
) -> None:
    """Raise DataError if `x` has an integer below 0, or an integer of `limit` or more."""
    low, high = value_range(x, on_piece) or (0, 0)
    if low < 0:
        raise DataError(
            "{origin}: integers in x must be 0 or above, but x contains {number}.",
            code="data.number-out-of-range",
            number=low,
            origin=origin,
        )
    if limit is not None and high >= limit:
        raise DataError(
            "{origin}: integers in x must be 0 to {highest} for this model, but x contains "
            "{number}.",
            code="data.number-out-of-range",
            number=high,
            highest=limit - 1,
            origin=origin,
        )


def unknown_class(origin: str, name: str, classes: Sequence[str]) -> DataError:
    """The error for a class `name` that the model does not have."""
    wanted = f"one of {', '.join(classes)}" if classes else "the number of a class, such as 0"
    return DataError(
        "{place}: the model has no class {name!r}{did_you_mean} It must be {wanted}.",
        code="data.unknown-class",
        name=name[:40],
        classes=list(classes),
        place=origin,
        did_you_mean=did_you_mean(name, classes),
        wanted=wanted,
    )


def not_readable(path: Path, error: OSError) -> DataError:
    """The error for local data that the operating system cannot read."""
    return DataError(
        "{path} cannot be read: {reason}.",
        code="data.unreadable-file",
        path=str(path),
        reason=str(error.strerror),
    )
