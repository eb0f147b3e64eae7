"""Stores arrays on disk that are too large for memory. Reserves the disk space before writing."""

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
"""Disk space that must stay free."""

LARGEST_READ = 1 << 30
"""Largest number of bytes that are read in one call."""
ROWS = 64
"""Rows of a mapped array to read at a time; Linux maps 64 KiB around each row."""

HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # the format version with a UTF-8 header
}
MOST_ROWS = 2**48
"""Arrays with an axis of this length or more are refused."""

LATER = "Free some space there and run the same command again: the training resumes"
ELSEWHERE = "Give a folder that can be written"
CURES = {
    errno.ENOSPC: LATER,
    errno.EDQUOT: LATER,
    errno.EROFS: ELSEWHERE,
    errno.EACCES: ELSEWHERE,
    errno.EPERM: ELSEWHERE,
    errno.EIO: "The disk is failing: look at the system's log",
}
"""The remedies for the errors of a disk."""


def room(folder: Path) -> int:
    """The number of bytes that may be written to `folder`."""
    return max(0, shutil.disk_usage(folder).free - MARGIN_BYTES)


def storage_error(error: OSError) -> StorageError | None:
    """Convert an error of the disk to a StorageError; None if `error` has another cause."""
    cure = CURES.get(error.errno or 0)
    if cure is None:
        return None
    return StorageError(
        "{file}: {reason}. {remedy}.",
        code="storage.disk-error",
        errno=errno.errorcode[error.errno or 0],
        file=error.filename or "A file",
        reason=error.strerror,
        remedy=cure,
    )


class MappedArray:
    """A read-only array of `dtype` and `shape` at `offset` (bytes) of the file `path`.

    A read access maps pages of the file into memory. `drop` releases these pages.
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
            # Rows of a Fortran-ordered array are not contiguous, so only the map can read them.
            if order != "F":
                self._path, self._offset, self._handle = path, offset, os.dup(file.fileno())
                weakref.finalize(self, os.close, self._handle)
        flat = np.frombuffer(self._map, dtype, count, offset)
        self.array = flat.reshape(shape, order="F" if order == "F" else "C")

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Copy the rows `indices`.

        Raises:
            DataError: The file became shorter.
        """
        result = np.empty((len(indices), *self.array.shape[1:]), self.array.dtype)
        if self._handle is None:
            for start in range(0, len(indices), ROWS):
                result[start : start + ROWS] = self.array[indices[start : start + ROWS]]
                self.drop()
            return result
        # Read from the file, not from the map: if another program shortens the file, access to a
        # mapped page would end the process.
        size = self.array.nbytes // len(self.array)
        begin, indices = 0, np.asarray(indices, np.int64)
        # Consecutive rows, as in a recording, are read in one call. The system reads at most 2 GiB
        # in a call.
        apart = np.diff(indices) != 1
        apart |= np.arange(1, len(apart) + 1) % max(1, LARGEST_READ // size) == 0
        for run in np.split(indices, np.flatnonzero(apart) + 1):
            part = result[begin : begin + len(run)]
            begin += len(run)
            if not part.size:
                continue
            at = self._offset + int(run[0]) * size
            if os.preadv(self._handle, [part.data], at) < part.nbytes:
                raise DataError(
                    "{path} became shorter while it was read: to replace a data file, write a new "
                    "file and rename it. Then run the same command again.",
                    code="data.changed-while-read",
                    path=str(self._path),
                )
        return result

    def drop(self) -> None:
        """Release the mapped pages. The next access maps pages again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def open_npy(path: Path, offset: int = 0, size: int | None = None) -> MappedArray:
    """Map .npy data that begin at `offset` in the file `path`, for example in an .npz file.

    The data have `size` bytes; by default they extend to the end of the file. Raises ValueError if
    these bytes are not a complete array of plain numbers.
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
    """Read the header of .npy data: shape, whether the order is Fortran's, and type.

    Raises ValueError if the header is damaged or does not describe plain numbers.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = HEADERS[version]
        with warnings.catch_warnings(action="ignore"):  # files that Python 2 wrote cause a warning
            shape, fortran, dtype = read(file)
    except MemoryError:
        raise
    except Exception:  # numpy evaluates the header, so a damaged one may raise anything
        raise ValueError("its header is not that of a .npy file") from None
    if dtype.hasobject:
        raise ValueError("it contains pickled objects")
    lengths = [length for length in shape if type(length) is int and 0 <= length < MOST_ROWS]
    if len(lengths) < len(shape) or not dtype.itemsize:
        raise ValueError(f"its header names the impossible shape {shape} of {dtype}")
    return shape, fortran, dtype


class Written(msgspec.Struct, frozen=True):
    """The part of a file that was written: the first `size` bytes, with their BLAKE2b digest."""

    size: int
    digest: str

    def still_in(self, path: Path) -> bool:
        """Whether the file at `path` still begins with these bytes. The digests are compared."""
        try:
            return FileDigest(path).up_to(self.size) == self
        except OSError:
            return False


class FileDigest:
    """Computes the BLAKE2b digest of the beginning of the file at `path` while the file grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._digest = hashlib.blake2b(digest_size=16)

    def up_to(self, size: int) -> Written:
        """Compute the digest of the first `size` bytes, or of the whole file if it is shorter.

        Each call reads only the bytes that earlier calls have not read.
        """
        with self.path.open("rb") as file:
            file.seek(self.size)
            while piece := file.read(min(size - self.size, 1 << 20)):
                self._digest.update(piece)
                self.size += len(piece)
        return Written(self.size, self._digest.hexdigest())


class NpyWriter:
    """Writes the .npy file `path` in pieces. Reserves the disk space when it opens the file.

    Raises OSError if there is not enough space. Without the reservation, a full disk would be
    noticed only in the middle of the file.
    """

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...], done: int = 0) -> None:
        """Create the file, or continue an existing one after its first `done` rows."""
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

    def append(self, rows: np.ndarray) -> None:
        """Append `rows`."""
        data = np.ascontiguousarray(rows).data
        with naming(self.path):
            self._file.write(data)

    def flush(self) -> int:
        """Pass the appended rows to the system. Returns the size of the file so far."""
        with naming(self.path):
            self._file.flush()
        return self._file.tell()

    def close(self) -> None:
        """Pass all data to the system and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()


def take(handle: int, size: int) -> None:
    """Reserve `size` bytes of disk space for the file, without holes."""
    if hasattr(os, "posix_fallocate"):  # macOS has no such call; writing may fail late there
        os.posix_fallocate(handle, 0, size)
