"""Recorded activations on disk: written batch by batch, read by index, never whole in memory."""

import shutil
from pathlib import Path

import numpy as np

from profiles.errors import DataError

MARGIN_BYTES = 16 << 20
"""Disk space that a recording leaves free."""


class Recording:
    """A memory-mapped array (samples, *shape) of float32 in one file."""

    def __init__(self, path: Path, samples: int, shape: tuple[int, ...]) -> None:
        """Make room for the whole array. Raises DataError where the disk has too little."""
        size = 4 * samples * int(np.prod(shape, dtype=np.int64))
        free = shutil.disk_usage(path.parent).free
        if size + MARGIN_BYTES > free:
            raise DataError(
                f"Recording activations takes {size / 1e6:.1f} MB at {path.parent}, where "
                f"{free / 1e6:.1f} MB are free: free some space or use fewer samples."
            )
        self.path = path
        self._array = np.lib.format.open_memmap(
            path, mode="w+", dtype=np.float32, shape=(samples, *shape)
        )

    def write(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Store the activations `values` of the samples `indices`."""
        self._array[indices] = values

    def read(self, indices: np.ndarray) -> np.ndarray:
        """A copy of the activations of the samples `indices`."""
        return np.asarray(self._array[indices])

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)
