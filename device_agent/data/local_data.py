"""Local training data: loaded from files or from the owner's function, and checked."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device_agent.data.array_files import (
    LABELS,
    SAMPLES,
    FileArray,
    as_array,
    convert_to_int64,
    described_names,
    read_arrays,
    read_headers,
    row_slices,
)
from device_agent.data.data_checks import MIN_SAMPLES, check_arrays, check_types
from device_agent.data.data_functions import call_function, is_reference, load_function
from device_agent.data.data_source import Data, needs_preparation
from device_agent.data.packed_arrays import array_names, packed_array
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import Dtype, Part
from device_agent.formats.packing import array_name, in_files
from device_agent.formats.preprocessing import Preprocessing
from device_agent.system.disk_space import MappedArray
from profiles.errors import DataError

LARGE_VALUE = 100.0
"""Models are designed for inputs around 1. A value above this may be why a training diverges."""


@dataclass(frozen=True)
class LocalData:
    """Samples and labels that were checked against a bundle.

    Attributes:
        x: Samples, shape (n, *sample_shape), in the type that the bundle requires.
        y: Labels, shape (n, *shape): classes (int64), or numbers for a regression (float32).
        mapped: The arrays that are memory-mapped files.
        fingerprint: Digest of all values. A checkpoint is only used with the same data.
        remarks: Notes for the owner of the data.
    """

    x: np.ndarray
    y: np.ndarray
    mapped: tuple[MappedArray, ...] = ()
    fingerprint: str = ""
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.y)

    def samples(self, indices: np.ndarray) -> np.ndarray:
        """Copy the samples with the indices `indices`. No page of a mapped file stays in memory."""
        return self._rows(self.x, indices)

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """Copy the labels of these samples. No page of a mapped file stays in memory."""
        return self._rows(self.y, indices)

    def largest(self) -> tuple[str, int, float] | None:
        """Find the value furthest from 0.

        Returns:
            The array ("x" or "y"), the sample and the value; None if no value exceeds
            `LARGE_VALUE`.
        """
        extreme = None
        most = LARGE_VALUE
        for name, array in (("x", self.x), ("y", self.y)):
            for rows in row_slices(array) if array.dtype == np.float32 else ():
                piece = self._rows(array, np.arange(len(array))[rows]).reshape(-1)
                index = int(np.abs(piece).argmax())
                if abs(piece[index]) > most:
                    most = float(abs(piece[index]))
                    sample = rows.start + index // (array.size // len(array))
                    extreme = name, sample, float(piece[index])
        return extreme

    def _rows(self, array: np.ndarray, indices: np.ndarray) -> np.ndarray:
        # Rows of a mapped file are read from the file. If the file was truncated, reading raises an
        # error, but an access to the mapping would end the process.
        mapped = next((candidate for candidate in self.mapped if candidate.array is array), None)
        return np.asarray(array[indices]) if mapped is None else mapped.rows(indices)


def load_data(
    source: Data,
    sample_shape: tuple[int, ...],
    labels: LabelRule,
    dtype: Dtype = "float32",
    limit: int | None = None,
    least: int = MIN_SAMPLES,
    unpack_to: Path | None = None,
    preprocessing: Preprocessing | None = None,
    parts: Sequence[Part] = (),
) -> LocalData:
    """Load samples and labels, and check that they fit a model.

    Files are memory-mapped, so they may be larger than memory.

    Args:
        source: An .npz file with `x` and `y`, a folder with x.npy and y.npy, a function
            `module:callable` that returns x and y, a pair of arrays (x, y), or a mapping with the
            keys `x` and `y`. If `preprocessing` is given, pictures and CSV files are also allowed,
            see `prepare`. If x or y consists of several arrays, their names in files are `x_NAME`
            or `y_NAME`. In a pair, a mapping or the result of a function, x or y is then a mapping
            {NAME: array}.
        sample_shape: Shape of one sample.
        labels: The labels that the model takes.
        dtype: Type of the samples that the model requires. If it is int64, int32 is converted.
        limit: Integers in `x` must be below this number.
        least: Smallest number of samples.
        unpack_to: Folder for large arrays that cannot be mapped: compressed arrays, results of a
            conversion to int64, and prepared samples.
        preprocessing: How pictures or CSV files become samples.
        parts: The arrays that are packed into the samples, see `formats/packing.py`. Empty if the
            samples are one array.

    Returns:
        The checked data. Several arrays are packed into one.

    Raises:
        DataError: The data cannot be read or do not fit the model.
        StorageError: The disk has too little space for unpacking.
        InputError: Pictures need a package that is not installed.
    """
    arrays: Mapping[str, FileArray]
    names = (*array_names(SAMPLES, parts), *array_names(LABELS, labels.parts))
    if not isinstance(source, str | Path):
        arrays = given_arrays(source, parts, labels.parts)
    elif isinstance(source, str) and is_reference(source):
        arrays = flat_arrays(*call_function(source), parts, labels.parts)
    elif needs_preparation(Path(source)):
        # Imported here, because agents with arrays do not need the memory of these modules.
        from device_agent.data.preparation import prepare

        arrays = prepare(Path(source), preprocessing, sample_shape, labels.as_read, unpack_to)
    else:
        arrays = read_arrays(Path(source), unpack_to, names)
    origin = name_of(source)
    x_source = packed_array(SAMPLES, arrays, parts, origin, unpack_to)
    y_source = packed_array(LABELS, arrays, labels.parts, origin, unpack_to)
    if dtype == "int64" and as_array(x_source).dtype == np.int32:
        x_source = convert_to_int64(x_source, unpack_to)
    mapped = tuple(array for array in (x_source, y_source) if isinstance(array, MappedArray))
    digest = hashlib.blake2b(digest_size=16)

    def add_piece(piece: np.ndarray) -> None:
        # The checks read every value, so the digest needs no second pass over the file.
        digest.update(piece.data)
        for array in mapped:
            array.drop()

    x, y = as_array(x_source), as_array(y_source)
    remarks = check_arrays(x, y, sample_shape, labels, origin, dtype, limit, least, add_piece)
    return LocalData(x, y, mapped, digest.hexdigest(), remarks)


def name_of(source: Data) -> str:
    """The name of `source` in error messages."""
    return str(source) if isinstance(source, str | Path) else "data"


def given_arrays(
    source: object, x_parts: Sequence[Part] = (), y_parts: Sequence[Part] = ()
) -> dict[str, np.ndarray]:
    """Take samples and labels from a pair (x, y), or from a mapping with `x` and `y`.

    Args:
        source: The pair or mapping. The keys of a mapping may also be the names of arrays in a
            file, such as `x_NAME`.
        x_parts: The arrays that are packed into x; empty if x is one array.
        y_parts: The arrays that are packed into y; empty if y is one array.

    Returns:
        The arrays by name. Each name is the array's name in a file.

    Raises:
        DataError: `source` is neither a pair nor such a mapping, or an array is missing or is not a
            numpy array.
    """
    if isinstance(source, Mapping):
        names = {SAMPLES: array_names(SAMPLES, x_parts), LABELS: array_names(LABELS, y_parts)}
        arrays: dict[str, np.ndarray] = {}
        for prefix, parts in ((SAMPLES, x_parts), (LABELS, y_parts)):
            missing = [name for name in names[prefix] if name not in source]
            if not missing:
                arrays |= {name: _numpy_array(name, source[name]) for name in names[prefix]}
            elif prefix in source:
                arrays |= named_arrays(prefix, source[prefix], parts)
            else:
                raise DataError(
                    "data has no array {array!r}. It must contain {wanted}.",
                    code="data.missing-array",
                    array=missing[0],
                    wanted=described_names(itertools.chain(*names.values())),
                )
        return arrays
    if isinstance(source, tuple) and len(source) == 2:
        return flat_arrays(*source, x_parts, y_parts)
    kind = type(source).__name__
    raise DataError(
        "data is a {kind}. Pass a path, module:callable, a pair of arrays (x, y) or a mapping with "
        "x and y.",
        code="data.wrong-kind",
        kind=kind,
    )


def flat_arrays(
    x: object, y: object, x_parts: Sequence[Part], y_parts: Sequence[Part]
) -> dict[str, np.ndarray]:
    """Return the arrays of `x` and `y`. The keys are the names of the arrays in files."""
    return {**named_arrays(SAMPLES, x, x_parts), **named_arrays(LABELS, y, y_parts)}


def named_arrays(prefix: str, given: object, parts: Sequence[Part]) -> dict[str, np.ndarray]:
    """Return the arrays in `given`. The keys are the names of the arrays in files.

    Args:
        prefix: `x` for samples, `y` for labels.
        given: One array, or a mapping with an array for each name in `parts`. If the loss reads no
            labels, `given` is not read for labels.
        parts: The arrays that are needed. Empty if `given` must be one array.

    Raises:
        DataError: An array is missing or is not a numpy array.
    """
    if parts and not in_files(parts):
        return {}
    if not parts or not parts[0].name:
        return {prefix: _numpy_array(prefix, given)}
    wanted = [part.name for part in parts]
    if not isinstance(given, Mapping) or any(name not in given for name in wanted):
        has = f"has {', '.join(map(str, given))}" if isinstance(given, Mapping) else ""
        raise DataError(
            "data: {array} must be a dictionary with the arrays {names}; it {given}.",
            code="data.missing-array",
            array=prefix,
            names=", ".join(wanted),
            given=has or f"is a {type(given).__name__}",
        )
    return {
        array_name(prefix, part): _numpy_array(array_name(prefix, part), given[part.name])
        for part in parts
    }


def _numpy_array(name: str, array: object) -> np.ndarray:
    """Return `array`. Raises DataError if `array` is no numpy array."""
    # numpy drops the mask of a masked array without a warning.
    if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        return array
    raise DataError(
        "data: {array} must be a numpy array; it is a {kind}. Convert it with "
        "numpy.asarray. Remove or fill masked samples first.",
        code="data.not-an-array",
        array=name,
        kind=type(array).__name__,
    )


def check_source(source: str, *, labels: bool = True) -> None:
    """Check a data source before a bundle is known, without reading the values.

    A function is imported but not called.

    Args:
        source: A source that `load_data` accepts.
        labels: Whether the data must have labels.

    Raises:
        DataError: No bundle could be trained on this source.
    """
    if is_reference(source):
        load_function(source)
        return
    if needs_preparation(Path(source)):
        from device_agent.data.preparation import check_files

        check_files(Path(source))
        return
    headers = read_headers(Path(source), labels=labels)
    samples = [name for name in headers if name.startswith(SAMPLES)]
    for x, y in itertools.product(samples, [name for name in headers if name not in samples]):
        (x_shape, x_type), (y_shape, y_type) = headers[x], headers[y]
        check_types(x_type, y_type, (x_shape, y_shape), source, (x, y))
