"""Arrays in files, mapped and not loaded: they may be larger than memory."""

import math
import shutil
import zipfile
from collections.abc import Iterator
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
PIECE_BYTES = 1 << 22
IN_MEMORY_BYTES = 1 << 24
"""Arrays up to this size are held where they cannot be mapped."""
LOCAL_HEADER_BYTES = 30
"""Fixed part of what precedes a member of a zip file; two lengths at its end follow."""

Found = np.ndarray | MappedArray
Header = tuple[tuple[int, ...], np.dtype]


def from_files(path: Path, unpack_to: Path | None = None) -> tuple[Found, Found]:
    """`x` and `y` of an .npz file, or of a folder that holds x.npy and y.npy.

    Pickled objects are refused. Compressed members are unpacked to the folder `unpack_to`, where
    there is one, and else into memory. Raises DataError; StorageError where there is no room.
    """
    with _in_words(path):
        if path.is_dir():
            return _from_folder(path)
        return _from_npz(path, unpack_to)


def headers(path: Path) -> tuple[Header, Header]:
    """Shape and type of `x` and `y` in what `from_files` reads, without reading their numbers.

    Raises DataError.
    """
    with _in_words(path):
        if path.is_dir():
            x, y = (found.array for found in _from_folder(path))
            return (x.shape, x.dtype), (y.shape, y.dtype)
        with _opened(path) as archive:
            x_header, y_header = (_header(archive, name) for name in (SAMPLES, LABELS))
            return x_header, y_header


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Turn what reading `path` raises into DataError."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give an .npz file with x and y.") from None
    except DataError:
        raise
    except Exception as error:  # numpy and zipfile raise a dozen kinds for damaged files
        if (short := ran_out(error)) is not None:
            raise short from None
        raise DataError(
            f"{path} is not a readable .npz file: {error}. Single arrays go into a folder, as "
            "x.npy and y.npy."
        ) from None


def _from_folder(path: Path) -> tuple[MappedArray, MappedArray]:
    files = [path / f"{name}.npy" for name in (SAMPLES, LABELS)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DataError(
            f"{path} is not a readable .npz file, and as a folder it lacks {missing[0].name}; it "
            "must hold x.npy (samples) and y.npy (labels)."
        )
    try:
        x, y = (open_npy(file) for file in files)
    except ValueError as error:
        raise DataError(f"{path} is no folder of readable .npy files: {error}.") from None
    return x, y


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive at `path`. Raises DataError unless it has both arrays."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        missing = [name for name in (SAMPLES, LABELS) if f"{name}.npy" not in names]
        if missing:
            raise DataError(
                f"{path} has no array {missing[0]!r}; it must hold x (samples) and y (labels)."
            )
        yield archive


def _header(archive: zipfile.ZipFile, name: str) -> Header:
    try:
        with archive.open(f"{name}.npy") as member:
            shape, _, dtype = read_header(member)
    except ValueError as error:
        raise ValueError(f"array {name}: {error}") from None
    return shape, dtype


def _from_npz(path: Path, unpack_to: Path | None) -> tuple[Found, Found]:
    with _opened(path) as archive:
        x, y = (_array(path, archive, name, unpack_to) for name in (SAMPLES, LABELS))
    return x, y


def _array(path: Path, archive: zipfile.ZipFile, name: str, unpack_to: Path | None) -> Found:
    """The array `name` of the archive. Raises ValueError that names it."""
    try:
        return _member(path, archive, f"{name}.npy", unpack_to)
    except ValueError as error:
        raise ValueError(f"array {name}: {error}") from None


def _member(path: Path, archive: zipfile.ZipFile, name: str, unpack_to: Path | None) -> Found:
    """One array of the archive: in its place where it is stored as it is, else unpacked."""
    about = archive.getinfo(name)
    with archive.open(name) as member:
        if about.compress_type != zipfile.ZIP_STORED:
            return _unpacked(path, member, name, about.file_size, unpack_to)
        while member.read(PIECE_BYTES):
            pass  # the archive's checksum is compared at the end
    with path.open("rb") as file:
        file.seek(about.header_offset + LOCAL_HEADER_BYTES - 4)
        lengths = file.read(4)
    name_length, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    begin = about.header_offset + LOCAL_HEADER_BYTES + name_length + extra
    return open_npy(path, begin, about.file_size)


def _unpacked(path: Path, member: IO[bytes], name: str, size: int, to: Path | None) -> Found:
    """The array that `member`, `size` bytes unpacked, holds: small ones in memory."""
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
            f"{path} is compressed; unpacking {name} takes {format_bytes(size)} at {to.parent}, "
            f"where {format_bytes(free)} are free: free some space, or store the arrays with "
            "np.savez, which are used in place."
        )
    to.mkdir(exist_ok=True)
    file = to / name
    try:
        with naming(file), file.open("wb") as unpacked:
            take(unpacked.fileno(), size)
            shutil.copyfileobj(member, unpacked, PIECE_BYTES)
    except OSError as error:
        raise storage_error(error) or error from None
    return open_npy(file)


def as_int64(found: Found, to: Path | None) -> Found:
    """Whole numbers of another type as int64, in pieces: small ones in memory."""
    array = plain(found)
    if to is None or 8 * array.size <= IN_MEMORY_BYTES:
        return array.astype(np.int64)
    to.mkdir(exist_ok=True)
    writer = NpyWriter(to / "x.int64.npy", np.dtype(np.int64), array.shape)
    for rows in pieces(array):
        writer.append(array[rows].astype(np.int64))
    writer.close()
    return open_npy(writer.path)


def plain(found: Found) -> np.ndarray:
    """The array itself."""
    return found.array if isinstance(found, MappedArray) else found


def pieces(array: np.ndarray) -> Iterator[slice]:
    """Slices of the first axis that together are all of `array`, each of about PIECE_BYTES."""
    rows = max(1, PIECE_BYTES * len(array) // max(1, array.nbytes))
    return (slice(start, start + rows) for start in range(0, len(array), rows))
