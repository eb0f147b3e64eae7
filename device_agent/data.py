"""Local training data: `.npz` files, or a function of the owner's, checked against the bundle."""

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device_agent.manifest import Dtype, labels_of
from device_agent.wording import counted
from profiles.errors import DataError

LEAST = 2
"""The fewest samples to train on: a batch norm cannot train on one."""


@dataclass(frozen=True)
class LocalData:
    """Samples `x` (n, *sample_shape) of the bundle's type and labels `y`.

    Those are classes (n,) int64, or for a regression numbers (n, outputs) float32.
    """

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)


def load_data(
    source: str,
    sample_shape: tuple[int, ...],
    classes: int,
    dtype: Dtype = "float32",
    limit: int | None = None,
    least: int = LEAST,
    labels: Dtype = "int64",
) -> LocalData:
    """Load `source`, a path to an .npz file with `x` and `y` or `module:callable` returning them.

    `dtype` is the samples' type; whole numbers are below `limit`, and int32 ones are converted.
    `labels` is the labels' type: classes, or float32 numbers for each of `classes` outputs.
    Raises DataError naming what does not fit: shapes, types, labels that a model with `classes`
    outputs cannot tell, numbers that are not finite or outside their range, fewer than `least`
    samples.
    """
    x, y = from_callable(source) if is_reference(source) else from_npz(Path(source))
    if dtype == "int64" and x.dtype == np.int32:
        x = x.astype(np.int64)
    check(x, y, sample_shape, classes, source, dtype, limit, least, labels)
    return LocalData(x, y)


def is_reference(source: str) -> bool:
    """Whether `source` names a function and not a file."""
    module, colon, name = source.partition(":")
    return bool(colon) and name.isidentifier() and not Path(source).exists() and "/" not in module


def from_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """`x` and `y` of an .npz file; pickled objects are refused."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in ("x", "y") if name not in file]
            if missing:
                raise DataError(
                    f"{path} has no array {missing[0]!r}; it must hold x (samples) and y (labels)."
                )
            return file["x"], file["y"]
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give an .npz file with x and y.") from None
    except DataError:
        raise
    except Exception as error:  # numpy and zipfile raise a dozen kinds for damaged files
        raise DataError(f"{path} is not a readable .npz file: {error}.") from None


def from_callable(source: str) -> tuple[np.ndarray, np.ndarray]:
    """What the function `module:callable` returns; the current folder is importable."""
    name, _, function = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(name), function)
    except (Exception, SystemExit) as error:  # the owner's code may raise anything
        raise DataError(f"{source} cannot be loaded: {error}.") from None
    try:
        x, y = found()
        return np.asarray(x), np.asarray(y)
    except (Exception, SystemExit) as error:
        raise DataError(f"{source} failed: {type(error).__name__}: {error}.") from error


def check(
    x: np.ndarray,
    y: np.ndarray,
    sample_shape: tuple[int, ...],
    classes: int | None,
    origin: str,
    dtype: Dtype = "float32",
    limit: int | None = None,
    least: int = LEAST,
    labels: Dtype = "int64",
) -> None:
    """Raise DataError unless `x` and `y` fit a model of such samples and `classes` outputs.

    `classes` is None where the model is not known yet.
    """
    if x.dtype != dtype or y.dtype != labels:
        raise DataError(
            f"{origin}: x must be {dtype} and y {labels}; they are {x.dtype} and {y.dtype}."
        )
    widths = () if labels == "int64" else ("outputs" if classes is None else classes,)
    fitting = y.ndim == 1 + len(widths) and (classes is None or y.shape[1:] == widths)
    if x.shape[1:] != sample_shape or not fitting or len(x) != len(y):
        raise DataError(
            f"{origin}: x must be {batch_of(sample_shape)} and y {batch_of(widths)}; they are "
            f"{x.shape} and {y.shape}."
        )
    if len(y) < least:
        needed = "training needs at least two" if least == LEAST else "give some"
        raise DataError(f"{origin} holds {counted(len(y), 'sample')}; {needed}.")
    if labels == "int64":
        check_classes(y, classes, origin)
    elif not np.isfinite(y).all():
        raise DataError(f"{origin}: y holds a number that is not finite; clean the data first.")
    if dtype == "int64":
        check_whole(x, limit, origin)
    elif not np.isfinite(x).all():
        raise DataError(f"{origin}: x holds a number that is not finite; clean the data first.")


def batch_of(shape: tuple[int | str, ...]) -> str:
    """The shape of a batch of `shape`, for a person."""
    return f"(n, {', '.join(map(str, shape))})" if shape else "(n,)"


def check_classes(y: np.ndarray, classes: int | None, origin: str) -> None:
    """Raise DataError where `y` holds a label that a model of `classes` outputs cannot tell."""
    top = None if classes is None else labels_of(classes) - 1
    if y.min() < 0 or (top is not None and y.max() > top):
        wrong = int(y.min() if y.min() < 0 else y.max())
        known = "from 0 up" if top is None else f"0 to {top}"
        raise DataError(f"{origin}: the label {wrong} is outside the model's classes {known}.")


def check_whole(x: np.ndarray, limit: int | None, origin: str) -> None:
    """Raise DataError where `x` holds a negative number or one that reaches `limit`."""
    if x.min() < 0:
        raise DataError(f"{origin}: x holds {x.min()}; its whole numbers must be at least 0.")
    if limit is not None and x.max() >= limit:
        raise DataError(
            f"{origin}: x holds {x.max()}; the model knows the whole numbers 0 to {limit - 1}."
        )


def batches(samples: int, size: int, order: np.random.Generator | None) -> list[np.ndarray]:
    """Index arrays that go once over `samples`, shuffled by `order` or in sequence.

    The last one may be smaller; a single left-over sample joins the batch before it, because a
    batch norm cannot train on one sample.
    """
    indices = np.arange(samples) if order is None else order.permutation(samples)
    starts = list(range(0, samples, size))
    if len(starts) > 1 and samples - starts[-1] == 1:
        starts.pop()
    return [indices[a:b] for a, b in zip(starts, [*starts[1:], samples], strict=True)]
