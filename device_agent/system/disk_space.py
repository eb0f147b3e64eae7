"""Room on disk for arrays that are too large to be held: found before it is written to."""

import errno
import hashlib
import math
import mmap
import os
import shutil
import warnings
import weakref
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from device_agent.formats.atomic_files import naming
from profiles.errors import DataError, StorageError

MARGIN_BYTES = 16 << 20
"""Disk space that is left free."""

ROWS = 64
"""Rows of a mapped array that are looked at at a time; Linux maps 64 KiB around each."""

HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # the same, in UTF-8
}
MOST_ROWS = 2**48
"""Any axis of an array is shorter."""

LATER = "free some space there and give the same command again; training goes on where it was"
ELSEWHERE = "give a place that may be written"
CURES = {
    errno.ENOSPC: LATER,
    errno.EDQUOT: LATER,
    errno.EROFS: ELSEWHERE,
    errno.EACCES: ELSEWHERE,
    errno.EPERM: ELSEWHERE,
    errno.EIO: "the disk is failing: look at the system's log",
}
"""What to do about the ways in which a disk refuses."""


def room(folder: Path) -> int:
    """Bytes that may be written below `folder`."""
    return max(0, shutil.disk_usage(folder).free - MARGIN_BYTES)


def storage_error(error: OSError) -> StorageError | None:
    """The sentence for a disk that refuses; None where `error` is about something else."""
    cure = CURES.get(error.errno or 0)
    if cure is None:
        return None
    return StorageError(f"{error.filename or 'A file'}: {error.strerror}; {cure}.")


class MappedArray:
    """The array of `dtype` and `shape` at `offset` of the file `path`, read only.

    Its pages come with what is looked at; `drop` takes those that have come out of the process.
    """

    def __init__(
        self, path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int, order: str = "C"
    ) -> None:
        count = math.prod(shape)
        self._map: mmap.mmap | None = None
        self._handle: int | None = None
        if count == 0:  # an empty file cannot be mapped
            self.array = np.empty(shape, dtype)
            return
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if order != "F":
                self._path, self._offset, self._handle = path, offset, os.dup(file.fileno())
                weakref.finalize(self, os.close, self._handle)
        flat = np.frombuffer(self._map, dtype, count, offset)
        self.array = flat.reshape(shape, order="F" if order == "F" else "C")

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """A copy of the rows `indices`.

        Each is read where it lies: a mapped page that is cut off its file meanwhile would end the
        process. Raises DataError where that happened.
        """
        found = np.empty((len(indices), *self.array.shape[1:]), self.array.dtype)
        if self._handle is None:
            for start in range(0, len(indices), ROWS):
                found[start : start + ROWS] = self.array[indices[start : start + ROWS]]
                self.drop()
            return found
        size = self.array.nbytes // len(self.array)
        for place, index in enumerate(indices):
            row, at = found[place : place + 1], self._offset + int(index) * size
            if os.preadv(self._handle, [row.data], at) < size:
                raise DataError(
                    f"{self._path} became shorter while it was read: put new data in its "
                    "place with a rename, and give the same command again."
                )
        return found

    def drop(self) -> None:
        """Give the pages back; the next look brings them in again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def open_npy(path: Path, offset: int = 0, size: int | None = None) -> MappedArray:
    """The array of the .npy file that is `size` bytes of `path` from `offset` on, or all the rest.

    Raises ValueError for anything that is no whole array of plain numbers.
    """
    end = path.stat().st_size if size is None else offset + size
    with path.open("rb") as file:
        file.seek(offset)
        shape, fortran, dtype = read_header(file)
        begin = file.tell()
    if end < begin + math.prod(shape) * dtype.itemsize:
        raise ValueError("it is truncated")
    return MappedArray(path, dtype, shape, begin, "F" if fortran else "C")


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether the first axis moves fastest, and type of the .npy data that follow.

    Raises ValueError where the header is none, or is not one of plain numbers.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = HEADERS[version]
        with warnings.catch_warnings(action="ignore"):  # of a file that Python 2 wrote
            shape, fortran, dtype = read(file)
    except MemoryError:
        raise
    except Exception:  # what a damaged header holds is evaluated, and may fail in many ways
        raise ValueError("its header is not one of a .npy file") from None
    if dtype.hasobject:
        raise ValueError("it holds pickled objects")
    lengths = [length for length in shape if type(length) is int and 0 <= length < MOST_ROWS]
    if len(lengths) < len(shape) or not dtype.itemsize:
        raise ValueError(f"its header names the impossible shape {shape} of {dtype}")
    return shape, fortran, dtype


class Written(msgspec.Struct, frozen=True):
    """The first `size` bytes of a file, and their BLAKE2b."""

    size: int
    digest: str

    def still_in(self, path: Path) -> bool:
        """Whether the file at `path` begins so."""
        try:
            return digest_of(path, self.size).hexdigest() == self.digest
        except OSError:
            return False


def digest_of(path: Path, size: int) -> "hashlib.blake2b":
    """The BLAKE2b of the first `size` bytes of the file at `path`, for more to be added to it."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while size and (piece := file.read(min(size, 1 << 20))):
            digest.update(piece)
            size -= len(piece)
    return digest


class NpyWriter:
    """Writes the .npy file `path` piece by piece, in room that is taken when it is opened.

    Raises OSError where there is none: a file with holes would end the process at the first write
    that finds the disk full.
    """

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...], done: int = 0) -> None:
        """Begin the file, or with `done` go on behind the first `done` rows of one begun before."""
        self.path = path
        self._row = math.prod(shape[1:]) * dtype.itemsize
        with naming(path):
            self._file = path.open("r+b" if done else "wb")
            if not done:
                about = {"descr": dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(self._file, about)
                self._file.flush()
                take(self._file.fileno(), self._file.tell() + shape[0] * self._row)
            else:
                read_header(self._file)
                self._file.seek(done * self._row, os.SEEK_CUR)
            self._digest = digest_of(path, self._file.tell())

    @property
    def written(self) -> Written:
        """What is written so far."""
        return Written(self._file.tell(), self._digest.hexdigest())

    def append(self, rows: np.ndarray) -> None:
        """Write the next rows."""
        data = np.ascontiguousarray(rows).data
        with naming(self.path):
            self._file.write(data)
        self._digest.update(data)

    def sync(self) -> None:
        """Bring what was appended to the disk."""
        with naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Bring all to the disk and close the file."""
        try:
            self.sync()
        finally:
            self._file.close()


def take(handle: int, size: int) -> None:
    """Take `size` bytes of disk for the file, without holes."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
