"""Recorded activations: written batch by batch, read by index, never whole in memory.

On disk, where they outlive the process; in memory only where the disk lacks room and memory has it.
"""

import math
from pathlib import Path

import numpy as np

from device_agent.system.disk_space import MappedArray, NpyWriter, Written, open_npy, room
from profiles.errors import StorageError
from profiles.text_formatting import format_bytes

FLOAT32 = np.dtype(np.float32)


class Recording:
    """An array (samples, *shape) of float32, in the file `path` or in memory.

    Written from the first sample to the last, then closed, then read. `written` is what the file
    held when it was last brought to the disk.
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
        """Make room for the whole array, or go on behind the first `done` samples of its file.

        With all samples done the file is only read. `memory_bytes` is what may be held in memory
        where the disk has too little room. Raises StorageError where neither has enough.
        """
        self.path = path
        self._done = done
        self._writer: NpyWriter | None = None
        self._mapped: MappedArray | None = None
        self._held: np.ndarray | None = None
        self.written: Written | None = None
        size = 4 * samples * math.prod(shape)
        free = room(path.parent)
        if done == samples:
            return
        if done or size <= free:
            self._writer = NpyWriter(path, FLOAT32, (samples, *shape), done)
        elif size <= memory_bytes:
            self._held = np.empty((samples, *shape), FLOAT32)
        else:
            raise StorageError(
                f"Recording activations takes {format_bytes(size)} at {path.parent}, where "
                f"{format_bytes(free)} are free: free some space or use fewer samples."
            )

    @property
    def kept(self) -> bool:
        """Whether what was written is there after the process."""
        return self._held is None

    def append(self, values: np.ndarray) -> None:
        """Store the activations `values` of the next samples."""
        if self._writer is not None:
            self._writer.append(values)
        elif self._held is not None:
            self._held[self._done : self._done + len(values)] = values
        self._done += len(values)

    def sync(self) -> None:
        """Bring what was appended to the disk."""
        if self._writer is not None:
            self._writer.sync()
            self.written = self._writer.written

    def close(self) -> None:
        """All is written: from now on it is read."""
        if self._writer is not None:
            self.written = self._writer.written
            self._writer.close()
            self._writer = None

    def read(self, indices: np.ndarray) -> np.ndarray:
        """A copy of the activations of the samples `indices`."""
        if self._held is not None:
            return np.asarray(self._held[indices])
        if self._mapped is None:
            self._mapped = open_npy(self.path)
        return self._mapped.rows(indices)

    def remove(self) -> None:
        """Delete the file."""
        self._mapped = self._held = None
        self.path.unlink(missing_ok=True)
