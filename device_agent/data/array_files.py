"""Local data files. Arrays may be larger than memory, so they are memory-mapped, not loaded."""

import math
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from device_agent.formats.atomic_files import naming
from device_agent.system.disk_space import (
    MappedArray,
    NpyWriter,
    open_npy,
    read_header,
    room,
    storage_error,
    take,
)
from device_agent.system.process_memory import ran_out
from profiles.errors import DataError, StorageError
from profiles.text_formatting import format_bytes

LABELS, SAMPLES = "y", "x"
MEANINGS = {SAMPLES: "x (samples)", LABELS: "y (labels)"}
MOST_NAMED = 8
"""The most arrays of a file that an error names."""
PIECE_BYTES = 1 << 22
"""Amount of data that is read or checked at a time."""
IN_MEMORY_BYTES = 1 << 24
"""Arrays that cannot be mapped are kept in memory up to this size. Larger ones are on disk."""
LOCAL_HEADER_BYTES = 30
"""Size of the fixed part of a zip member's local header.

Its last four bytes are the lengths of the file name and of the extra field that follow it.
"""

FileArray = np.ndarray | MappedArray
Header = tuple[tuple[int, ...], np.dtype]
"""Shape and type of an array."""


def read_arrays(
    path: Path, unpack_to: Path | None = None, names: Sequence[str] = (SAMPLES, LABELS)
) -> dict[str, FileArray]:
    """Open arrays of an .npz file, or of a folder with an .npy file for each array.

    Args:
        path: The file or folder. Pickled objects are refused.
        unpack_to: Folder for large compressed arrays. Without this folder they are unpacked into
            memory.
        names: Names of the arrays.

    Returns:
        The arrays by name, memory-mapped if the file allows it.

    Raises:
        DataError: The file is missing, unreadable or lacks an array.
        StorageError: The disk has too little space for unpacking.
    """
    with _data_errors(path):
        if path.is_dir():
            return dict(_read_folder(path, names))
        if len(names) > 1:
            _refuse_single(path)
        if path.suffix == ".npy":
            return {names[0]: open_npy(path)}
        with _open_archive(path, names) as archive:
            return {name: _read_array(path, archive, name, unpack_to) for name in names}


def read_headers(path: Path, *, labels: bool = True) -> dict[str, Header]:
    """Read shapes and types of the samples and labels in `path` without reading their values.

    Args:
        path: A file or folder that `read_arrays` can read.
        labels: Whether `path` must contain labels. If not, labels are not read.

    Returns:
        The headers of `x` and `y`, or of the arrays `x_NAME` and `y_NAME` that replace them.

    Raises:
        DataError: The file is missing, unreadable or lacks an array.
    """
    with _data_errors(path):
        if path.is_dir():
            names = _present([file.stem for file in sorted(path.glob("*.npy"))], labels)
            read = _read_folder(path, names)
            return {name: (own.array.shape, own.array.dtype) for name, own in read.items()}
        _refuse_single(path)
        with zipfile.ZipFile(path) as archive:
            names = _present([name.removesuffix(".npy") for name in archive.namelist()], labels)
        with _open_archive(path, names) as archive:
            return {name: _member_header(archive, name) for name in names}


def _present(names: Sequence[str], labels: bool) -> list[str]:
    """The names of the samples, and of the `labels`, among `names`: `x`, or all `x_NAME`."""
    chosen: list[str] = []
    for array in (SAMPLES, LABELS) if labels else (SAMPLES,):
        several = sorted(name for name in names if name.startswith(f"{array}_"))
        chosen += several if several and array not in names else [array]
    return chosen


def _refuse_single(path: Path) -> None:
    """Raise DataError if `path` is an .npy file, which has no labels."""
    if path.suffix == ".npy" and path.exists():
        raise DataError(
            "{path} is a single array, but samples need labels: put both into an .npz file as x "
            "and y, or into a folder as x.npy and y.npy (x_NAME and y_NAME for several inputs or "
            "outputs).",
            code="data.unreadable-file",
            path=str(path),
        )


@contextmanager
def _data_errors(path: Path) -> Iterator[None]:
    """Convert the exceptions of reading `path` to DataError."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(
            "{path} does not exist; give an .npz file with x and y, or x_NAME and y_NAME for "
            "several inputs or outputs.",
            code="data.missing-file",
            path=str(path),
        ) from None
    except DataError:
        raise
    except Exception as error:  # numpy and zipfile raise a dozen kinds for damaged files
        if (short := ran_out(error)) is not None:
            raise short from None
        raise DataError(
            "{path} is not a readable {kind} file: {reason}. Write it again with numpy.",
            code="data.unreadable-file",
            path=str(path),
            reason=str(error),
            kind=".npy" if path.suffix == ".npy" else ".npz",
        ) from None


def _read_folder(path: Path, names: Sequence[str]) -> dict[str, MappedArray]:
    files = {name: path / f"{name}.npy" for name in names}
    missing = [file for file in files.values() if not file.is_file()]
    if missing:
        raise DataError(
            "The folder {path} has no {file}. It must have {wanted}.",
            code="data.missing-array",
            path=str(path),
            array=missing[0].stem,
            file=missing[0].name,
            wanted=" and ".join(f"{name}.npy" for name in names),
        )
    try:
        return {name: open_npy(file) for name, file in files.items()}
    except ValueError as error:
        raise DataError(
            "{path} is not a folder of readable .npy files: {reason}.",
            code="data.unreadable-file",
            path=str(path),
            reason=str(error),
        ) from None


@contextmanager
def _open_archive(path: Path, wanted: Sequence[str]) -> Iterator[zipfile.ZipFile]:
    """Open the archive at `path`. Raises DataError if an array of `wanted` is missing."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        missing = [name for name in wanted if f"{name}.npy" not in names]
        if missing:
            arrays = ", ".join(name.removesuffix(".npy") for name in names[:MOST_NAMED])
            raise DataError(
                "{path} has no array {array!r}, only {arrays}. It must contain {wanted}.",
                code="data.missing-array",
                path=str(path),
                array=missing[0],
                arrays=arrays or "nothing",
                wanted=described_names(wanted),
            )
        yield archive


def described_names(names: Iterable[str]) -> str:
    """The names of arrays with their meaning in words.

    Examples:
        >>> described_names(["x", "y"])
        'x (samples) and y (labels)'
    """
    return " and ".join(MEANINGS.get(name, name) for name in names)


def _member_header(archive: zipfile.ZipFile, name: str) -> Header:
    try:
        with archive.open(f"{name}.npy") as member:
            shape, _, dtype = read_header(member)
    except ValueError as error:
        raise ValueError(f"array {name}: {error}") from None
    return shape, dtype


def _read_array(
    path: Path, archive: zipfile.ZipFile, name: str, unpack_to: Path | None
) -> FileArray:
    """Read the array `name` of the archive. Raises ValueError with `name` for a damaged array."""
    try:
        return _read_member(path, archive, f"{name}.npy", unpack_to)
    except ValueError as error:
        raise ValueError(f"array {name}: {error}") from None


def _read_member(
    path: Path, archive: zipfile.ZipFile, name: str, unpack_to: Path | None
) -> FileArray:
    """Read the member `name`: map it from the archive, or unpack it if it is compressed."""
    about = archive.getinfo(name)
    with archive.open(name) as member:
        if about.compress_type != zipfile.ZIP_STORED:
            return _unpack(path, member, name, about.file_size, unpack_to)
        # Mapping bypasses zipfile's checksum. Reading to the end once makes zipfile compare it.
        while member.read(PIECE_BYTES):
            pass
    # zipfile does not say where the data begin: name and extra field of the local header may
    # differ in length from those in the archive's directory.
    with path.open("rb") as file:
        file.seek(about.header_offset + LOCAL_HEADER_BYTES - 4)
        lengths = file.read(4)
    name_length, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    begin = about.header_offset + LOCAL_HEADER_BYTES + name_length + extra
    return open_npy(path, begin, about.file_size)


def _unpack(path: Path, member: IO[bytes], name: str, size: int, to: Path | None) -> FileArray:
    """Unpack the array of `size` bytes in `member`: small arrays to memory, others to disk."""
    if to is None or size <= IN_MEMORY_BYTES:
        shape, fortran, dtype = read_header(member)
        data, count = member.read(), math.prod(shape)
        if len(data) < count * dtype.itemsize:
            raise ValueError("it is truncated")
        flat = np.frombuffer(data, dtype, count) if count else np.empty(0, dtype)
        return flat.reshape(shape, order="F" if fortran else "C")
    free = room(to.parent)
    if size > free:
        raise StorageError(
            "{archive} is compressed. Unpacking {file} needs {needed} in {path}, but only {free} "
            "are free. Free some space, or store the arrays with np.savez: they are then used "
            "without unpacking.",
            code="storage.too-little-space",
            path=str(to.parent),
            needed_bytes=size,
            free_bytes=free,
            archive=path,
            file=name,
            needed=format_bytes(size),
            free=format_bytes(free),
        )
    to.mkdir(exist_ok=True)
    file = to / name
    try:
        with naming(file), file.open("wb") as unpacked:
            # Reserve the space first: a mapped file with holes would crash the process on a full
            # disk.
            take(unpacked.fileno(), size)
            shutil.copyfileobj(member, unpacked, PIECE_BYTES)
    except OSError as error:
        raise storage_error(error) or error from None
    return open_npy(file)


def convert_to_int64(source: FileArray, to: Path | None) -> FileArray:
    """Convert an integer array to int64.

    Args:
        source: The integers.
        to: Folder for a result that is larger than `IN_MEMORY_BYTES`. Without this folder the
            result is always in memory.

    Returns:
        The converted array, memory-mapped if it was written to disk.
    """
    array = as_array(source)
    if to is None or 8 * array.size <= IN_MEMORY_BYTES:
        return array.astype(np.int64)
    to.mkdir(exist_ok=True)
    writer = NpyWriter(to / "x.int64.npy", np.dtype(np.int64), array.shape)
    for rows in row_slices(array):
        writer.append(array[rows].astype(np.int64))
    writer.close()
    return open_npy(writer.path)


def as_array(source: FileArray) -> np.ndarray:
    """The numpy array of `source`."""
    return source.array if isinstance(source, MappedArray) else source


def row_slices(array: np.ndarray) -> Iterator[slice]:
    """Slices of the first axis that cover `array` in order, each of about `PIECE_BYTES` bytes."""
    rows = max(1, PIECE_BYTES * len(array) // max(1, array.nbytes))
    return (slice(start, start + rows) for start in range(0, len(array), rows))
