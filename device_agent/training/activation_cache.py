"""Recorded activations, written in sample order and read by sample index.

A recording is normally a file, so that it survives a restart and never has to fit in memory. If the
disk has too little free space but memory has enough, the recording is kept in memory instead.
"""

import math
from pathlib import Path

import numpy as np

from device_agent.system.disk_space import MappedArray, NpyWriter, Written, open_npy, room
from profiles.errors import StorageError
from profiles.text_formatting import format_bytes

FLOAT32 = np.dtype(np.float32)


class Recording:
    """A float32 array of shape (samples, *shape), stored in the file `path` or in memory.

    Call `append` for the samples in order, then `close`, then `read`.

    Attributes:
        path: The .npy file. It does not exist if the recording is in memory.
        written: Size and digest of the file when it was last flushed to disk; None before that.
    """

    def __init__(
        self,
        path: Path,
        samples: int,
        shape: tuple[int, ...],
        *,
        done: int = 0,
        memory_bytes: int = 0,
    ) -> None:
        """Reserve space for the whole array, or continue an existing file.

        Args:
            path: The .npy file to write.
            samples: Number of samples in the finished recording.
            shape: Shape of the activations of one sample.
            done: Number of samples that the file already holds. If all are done, the file is only
                read.
            memory_bytes: Memory in bytes that the array may use if it does not fit on the disk.

        Raises:
            StorageError: The array fits neither on the disk nor in `memory_bytes`.
        """
        self.path = path
        self._done = done
        self._writer: NpyWriter | None = None
        self._mapped: MappedArray | None = None
        self._in_memory: np.ndarray | None = None
        self.written: Written | None = None
        size = FLOAT32.itemsize * samples * math.prod(shape)
        free = room(path.parent)
        if done == samples:
            return
        # A file that has been started already has its space reserved, so it needs no check.
        if done or size <= free:
            self._writer = NpyWriter(path, FLOAT32, (samples, *shape), done)
        elif size <= memory_bytes:
            self._in_memory = np.empty((samples, *shape), FLOAT32)
        else:
            raise StorageError(
                f"Recording activations needs {format_bytes(size)} in {path.parent}, but only "
                f"{format_bytes(free)} are free. Free some space or use fewer samples.",
                code="storage.too-little-space",
                path=str(path.parent),
                needed_bytes=size,
                free_bytes=free,
            )

    @property
    def kept(self) -> bool:
        """Whether the recording is in a file, which survives the process."""
        return self._in_memory is None

    def append(self, values: np.ndarray) -> None:
        """Store the activations `values`, shape (n, *shape), of the next n samples."""
        if self._writer is not None:
            self._writer.append(values)
        elif self._in_memory is not None:
            self._in_memory[self._done : self._done + len(values)] = values
        self._done += len(values)

    def sync(self) -> None:
        """Flush the appended samples to disk."""
        if self._writer is not None:
            self._writer.sync()
            self.written = self._writer.written

    def close(self) -> None:
        """Finish writing. Only `read` and `remove` may follow."""
        if self._writer is not None:
            self.written = self._writer.written
            self._writer.close()
            self._writer = None

    def read(self, indices: np.ndarray) -> np.ndarray:
        """A copy of the activations of the samples `indices`, shape (len(indices), *shape)."""
        if self._in_memory is not None:
            return np.asarray(self._in_memory[indices])
        if self._mapped is None:
            self._mapped = open_npy(self.path)
        return self._mapped.rows(indices)

    def remove(self) -> None:
        """Delete the file and release the memory."""
        self._mapped = self._in_memory = None
        self.path.unlink(missing_ok=True)


class RecordingInMemory(Recording):
    """A recording without a file, for trainings without a folder."""

    def __init__(self, samples: int, shape: tuple[int, ...]) -> None:
        self.written = self._writer = self._mapped = None
        self._done = 0
        self._in_memory = np.empty((samples, *shape), FLOAT32)

    def remove(self) -> None:
        """Release the memory."""
        self._in_memory = None
