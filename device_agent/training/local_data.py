"""Local training data: files, or a function of the owner's, checked against the bundle."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device_agent.formats.manifest import Dtype, labels_of
from device_agent.system.disk_space import MappedArray
from device_agent.training.array_files import as_int64, from_files, headers, pieces, plain
from device_agent.training.data_functions import from_callable, is_reference, load_function
from profiles.errors import DataError
from profiles.text_formatting import counted

LEAST = 2
"""The fewest samples to train on: a batch norm cannot train on one."""

SAMPLE_TYPES, LABEL_TYPES = ("float32", "int64", "int32"), ("int64", "float32")
"""What the samples and labels of one bundle or another may be."""

LARGE = 100.0
"""Models are made for numbers around 1: one beyond this may be why a training diverges."""

Note = Callable[[np.ndarray], object]
"""Is given every piece of the data that is looked at."""


def nothing(piece: np.ndarray) -> None:
    """Let the piece pass."""


@dataclass(frozen=True)
class LocalData:
    """Samples `x` (n, *sample_shape) of the bundle's type and labels `y`.

    Those are classes (n,) int64, or for a regression numbers (n, outputs) float32. `mapped` are the
    arrays that are on disk, `fingerprint` tells these data from others, and `remarks` are what
    their owner should know of them.
    """

    x: np.ndarray
    y: np.ndarray
    mapped: tuple[MappedArray, ...] = ()
    fingerprint: str = ""
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """A copy of the samples `indices`; none of what is on disk stays in memory."""
        return self._rows(self.x, indices)

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """A copy of their labels, likewise."""
        return self._rows(self.y, indices)

    def largest(self) -> tuple[str, int, float] | None:
        """The number furthest from 0: x or y, the sample and the number; None below `LARGE`."""
        found = None
        most = LARGE
        for name, array in (("x", self.x), ("y", self.y)):
            for rows in pieces(array) if array.dtype == np.float32 else ():
                piece = self._rows(array, np.arange(len(array))[rows]).reshape(-1)
                place = int(np.abs(piece).argmax())
                if abs(piece[place]) > most:
                    most = float(abs(piece[place]))
                    sample = rows.start + place // (array.size // len(array))
                    found = name, sample, float(piece[place])
        return found

    def _rows(self, array: np.ndarray, indices: np.ndarray) -> np.ndarray:
        mapped = next((found for found in self.mapped if found.array is array), None)
        return np.asarray(array[indices]) if mapped is None else mapped.rows(indices)


def load_data(
    source: str,
    sample_shape: tuple[int, ...],
    classes: int,
    dtype: Dtype = "float32",
    limit: int | None = None,
    least: int = LEAST,
    labels: Dtype = "int64",
    unpack_to: Path | None = None,
) -> LocalData:
    """The samples and labels that `source` names, checked.

    That is an .npz file with `x` and `y`, a folder of x.npy and y.npy, or a function
    `module:callable` that returns them. Files are mapped, so they may be larger than
    memory; what cannot be mapped, compressed members and int32 numbers to convert, is written to
    the folder `unpack_to` where it is large.
    `dtype` is the samples' type; whole numbers are below `limit`, and int32 ones are converted.
    `labels` is the labels' type: classes, or float32 numbers for each of `classes` outputs.
    Raises DataError naming what does not fit: shapes, types, labels that a model with `classes`
    outputs cannot tell, numbers that are not finite or outside their range, fewer than `least`
    samples.
    """
    found = from_callable(source) if is_reference(source) else from_files(Path(source), unpack_to)
    if dtype == "int64" and plain(found[0]).dtype == np.int32:
        found = as_int64(found[0], unpack_to), found[1]
    mapped = tuple(array for array in found if isinstance(array, MappedArray))
    digest = hashlib.blake2b(digest_size=16)

    def note(piece: np.ndarray) -> None:
        digest.update(piece.data)
        for array in mapped:
            array.drop()

    x, y = map(plain, found)
    remarks = check(x, y, sample_shape, classes, source, dtype, limit, least, labels, note)
    return LocalData(x, y, mapped, digest.hexdigest(), remarks)


def check_source(source: str) -> None:
    """Raise DataError for a `source` that no bundle could be trained on.

    That is found out before there is a bundle, and without reading the numbers; a function is
    loaded and not called.
    """
    if is_reference(source):
        load_function(source)
        return
    (x, x_type), (y, y_type) = headers(Path(source))
    if str(x_type) not in SAMPLE_TYPES or str(y_type) not in LABEL_TYPES:
        raise DataError(
            f"{source}: x must be {' or '.join(SAMPLE_TYPES)} and y {' or '.join(LABEL_TYPES)}; "
            f"they are {x_type} and {y_type}. Convert them with numpy's astype."
        )
    if not x or x[:1] != y[:1]:
        raise DataError(f"{source}: x and y must hold as many samples each; they are {x} and {y}.")
    check_enough(x[0], source, LEAST)


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
    note: Note = nothing,
) -> tuple[str, ...]:
    """Raise DataError unless `x` and `y` fit a model of such samples and `classes` outputs.

    `classes` is None where the model is not known yet. The numbers are looked at piece by piece,
    and each piece is given to `note`. Returns what is no error but should be known.
    """
    if x.dtype != dtype or y.dtype != labels:
        other = {str(y.dtype), labels} == {"int64", "float32"}
        cure = f"Convert them: x.astype({dtype!r}), y.astype({labels!r})."
        if other:
            cure = "Classes are int64; float32 is for a regression, of loss mse."
        raise DataError(
            f"{origin}: x must be {dtype} and y {labels}; they are {x.dtype} and {y.dtype}. {cure}"
        )
    widths = () if labels == "int64" else ("outputs" if classes is None else classes,)
    fitting = y.ndim == 1 + len(widths) and (classes is None or y.shape[1:] == widths)
    if x.shape[1:] != sample_shape or not fitting or len(x) != len(y):
        raise DataError(
            f"{origin}: x must be {batch_of(sample_shape)} and y {batch_of(widths)}; they are "
            f"{x.shape} and {y.shape}."
        )
    check_enough(len(y), origin, least)
    remarks: tuple[str, ...] = ()
    if labels == "int64":
        remarks = check_classes(y, classes, origin, note)
    else:
        check_finite(y, "y", origin, note)
    if dtype == "int64":
        check_whole(x, limit, origin, note)
    else:
        check_finite(x, "x", origin, note)
    return remarks


def check_enough(samples: int, origin: str, least: int) -> None:
    """Raise DataError for fewer than `least` samples."""
    if samples < least:
        needed = "training needs at least two" if least == LEAST else "give some"
        raise DataError(f"{origin} holds {counted(samples, 'sample')}; {needed}.")


def batch_of(shape: tuple[int | str, ...]) -> str:
    """The shape of a batch of `shape`, for a person."""
    return f"(n, {', '.join(map(str, shape))})" if shape else "(n,)"


def check_finite(array: np.ndarray, name: str, origin: str, note: Note) -> None:
    """Raise DataError where `array` holds a number that is not finite."""
    for rows in pieces(array):
        piece = np.ascontiguousarray(array[rows])
        if not (whole := np.isfinite(piece)).all():
            place = tuple(int(n) for n in np.argwhere(~whole)[0])
            row = rows.start + place[0]
            raise DataError(
                f"{origin}: {name} holds a number that is not finite, {piece[place]} in sample "
                f"{row} (counted from 0); clean the data first."
            )
        note(piece)


def extent(array: np.ndarray, note: Note) -> tuple[int, int]:
    """The least and the greatest of the whole numbers in `array`."""
    ends = []
    for rows in pieces(array):
        piece = np.ascontiguousarray(array[rows])
        ends += [int(piece.min()), int(piece.max())]
        note(piece)
    return min(ends), max(ends)


def check_classes(
    y: np.ndarray, classes: int | None, origin: str, note: Note = nothing
) -> tuple[str, ...]:
    """Raise DataError where `y` holds a label that a model of `classes` outputs cannot tell.

    One class alone is no error, for a fleet's other devices may have the rest: it is remarked.
    """
    top = None if classes is None else labels_of(classes) - 1
    low, high = extent(y, note)
    if low < 0 or (top is not None and high > top):
        wrong = low if low < 0 else high
        known = "from 0 up" if top is None else f"0 to {top}"
        raise DataError(f"{origin}: the label {wrong} is outside the model's classes {known}.")
    if low < high:
        return ()
    return (
        f"{origin}: every sample is of the class {low}; of the others the model learns nothing "
        "here.",
    )


def check_whole(x: np.ndarray, limit: int | None, origin: str, note: Note = nothing) -> None:
    """Raise DataError where `x` holds a negative number or one that reaches `limit`."""
    low, high = extent(x, note)
    if low < 0:
        raise DataError(f"{origin}: x holds {low}; its whole numbers must be at least 0.")
    if limit is not None and high >= limit:
        raise DataError(
            f"{origin}: x holds {high}; the model knows the whole numbers 0 to {limit - 1}."
        )


def classes_in(y: np.ndarray, samples: np.ndarray, classes: int) -> np.ndarray:
    """1 for each of `classes` classes that one of `samples` has in `y`, 0 for the others."""
    found = np.zeros(classes, bool)
    for rows in pieces(samples):
        found |= np.isin(np.arange(classes), y[samples[rows]])
    return found.astype(np.float32)


def held_out(samples: int, share: float) -> np.ndarray:
    """Numbers of the samples that validate, ascending: the same `share` of the data every time.

    Raises DataError where too few are left on either side.
    """
    count = round(samples * share)
    if share and (count < 1 or samples - count < LEAST):
        raise DataError(
            f"Validating on {share:g} of {counted(samples, 'sample')} leaves {samples - count} to "
            f"train and {count} to validate; at least {LEAST} and 1 are needed."
        )
    return np.sort(np.random.default_rng(samples).permutation(samples)[:count])


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
