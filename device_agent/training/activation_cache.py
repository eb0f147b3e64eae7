"""Stores recorded activations. They are written in sample order and read by sample index.

A recording is normally a file. A file survives a restart and may be larger than memory. If the disk
has too little free space but memory has enough, the recording is kept in memory.
"""

import math
import os
from pathlib import Path

import numpy as np

from device_agent.formats.atomic_files import naming
from device_agent.formats.manifest import RecordedDtype
from device_agent.system.disk_space import (
    FileDigest,
    MappedArray,
    NpyWriter,
    Written,
    open_npy,
    room,
)
from profiles.errors import StorageError, UpdateError
from profiles.text_formatting import format_bytes


def to_float16(values: np.ndarray) -> np.ndarray:
    """Convert `values` to float16, rounded to the nearest number, ties to even.

    Infinity and NaN stay unchanged.

    Raises:
        UpdateError: A finite number is beyond float16's range.

    Examples:
        >>> to_float16(np.float32([1 / 3, 65504]))
        array([3.333e-01, 6.550e+04], dtype=float16)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        half = values.astype(np.float16)
    beyond = values[np.isinf(half) & np.isfinite(values)]
    if beyond.size:
        largest = float(np.abs(beyond).max())
        raise UpdateError(
            "Recorded activations must be at most 65,504 in float16, but one is {number:g}. "
            "Check the data. If they are right, use a submodel without recording=float16.",
            code="update.beyond-float16",
            number=largest,
        )
    return half


class Recording:
    """Activations of shape (samples, *shape), stored in the file `path` or in memory.

    Call `append` for the samples in order, then `close`, then `read`.

    Attributes:
        path: The .npy file. The file does not exist if the recording is in memory.
    """

    def __init__(
        self,
        path: Path,
        samples: int,
        shape: tuple[int, ...],
        *,
        dtype: RecordedDtype = "float32",
        done: int = 0,
        memory_bytes: int = 0,
    ) -> None:
        """Reserve space for the whole array, or continue an existing file.

        Args:
            path: The .npy file to write.
            samples: Number of samples in the finished recording.
            shape: Shape of the activations of one sample.
            dtype: Type of the stored numbers.
            done: Number of samples that the file already has. A file with all samples is only read.
            memory_bytes: Memory in bytes that the array may use if it does not fit on the disk.

        Raises:
            StorageError: The array fits neither on the disk nor in `memory_bytes`.
        """
        self.path = path
        self._dtype = np.dtype(dtype)
        self._done = done
        self._writer: NpyWriter | None = None
        self._mapped: MappedArray | None = None
        self._in_memory: np.ndarray | None = None
        self._digest = FileDigest(path)
        size = self._dtype.itemsize * samples * math.prod(shape)
        free = room(path.parent)
        if done == samples:
            return
        # If the file has been started, its space is already reserved, so there is no check.
        if done or size <= free:
            self._writer = NpyWriter(path, self._dtype, (samples, *shape), done)
        elif size <= memory_bytes:
            self._in_memory = np.empty((samples, *shape), self._dtype)
        else:
            raise StorageError(
                "Recording activations needs {needed} in {path}, but only {free} are free. Free "
                "some space or use fewer samples.",
                code="storage.too-little-space",
                path=str(path.parent),
                needed_bytes=size,
                free_bytes=free,
                needed=format_bytes(size),
                free=format_bytes(free),
            )

    @property
    def kept(self) -> bool:
        """Whether the recording is in a file, which survives the process."""
        return self._in_memory is None

    def append(self, values: np.ndarray) -> None:
        """Store the float32 activations `values`, shape (n, *shape), of the next n samples.

        Raises:
            UpdateError: A number is beyond the range of the recording's type.
        """
        if self._dtype == np.float16:
            # One sample at a time, so that the batch is not in memory a second time.
            for index in range(len(values)):
                self._store(to_float16(values[index : index + 1]))
        else:
            self._store(values)

    def _store(self, values: np.ndarray) -> None:
        """Store `values`, which have the recording's type."""
        if self._writer is not None:
            self._writer.append(values)
        elif self._in_memory is not None:
            self._in_memory[self._done : self._done + len(values)] = values
        self._done += len(values)

    def stored(self) -> Written | None:
        """Flush the samples to the disk. Returns the size and digest of the file so far.

        Returns None if the recording is in memory. Only checkpoints need the digest, and most
        recordings are read and deleted before the first checkpoint.
        """
        if not self.kept:
            return None
        size = self.path.stat().st_size if self._writer is None else self._writer.flush()
        if size > self._digest.size:
            with naming(self.path), self.path.open("rb+") as file:
                os.fsync(file.fileno())
        return self._digest.up_to(size)

    def close(self) -> None:
        """Finish writing. `append` must not be called afterwards."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Copy the activations of the samples with these `indices` as float32.

        The shape of the copy is (len(indices), *shape).
        """
        if self._in_memory is not None:
            rows = np.asarray(self._in_memory[indices])
        else:
            if self._mapped is None:
                self._mapped = open_npy(self.path)
            rows = self._mapped.rows(indices)
        return rows.astype(np.float32, copy=False)

    def remove(self) -> None:
        """Delete the file and release the memory."""
        self._mapped = self._in_memory = None
        self.path.unlink(missing_ok=True)


class RecordingInMemory(Recording):
    """A recording without a file, for trainings without a folder."""

    def __init__(self, samples: int, shape: tuple[int, ...], dtype: RecordedDtype) -> None:
        self._writer = self._mapped = None
        self._dtype, self._done = np.dtype(dtype), 0
        self._in_memory = np.empty((samples, *shape), self._dtype)

    def remove(self) -> None:
        """Release the memory."""
        self._in_memory = None
