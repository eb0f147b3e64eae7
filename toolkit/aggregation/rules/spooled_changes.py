"""Writes the changes of each update to a file, so that memory contains only few of them."""

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

NUMBERS = 1 << 20
"""How many changes are in memory at a time, of all updates together."""
LARGEST = np.float32(1e30)
"""A larger change counts as this number, because products of an update's factors may overflow."""


class Piece(NamedTuple):
    """Some elements of a tensor: [start, stop) of its flat array.

    `changes` has a row for each update that contains the tensor. A row has NaN for elements that
    the update does not contain. `rows` are the numbers of the updates.
    """

    start: int
    stop: int
    changes: np.ndarray
    rows: np.ndarray


class SpooledChanges:
    """The changes of all updates, in a temporary folder: a file for each update.

    The environment variable TMPDIR says where the folder is created; `close` deletes it. A file has
    four bytes for each number of the model. Memory contains at most `NUMBERS` changes, or one
    element of each update.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="edgetailor-round-")
        self._places: list[Mapping[str, int]] = []
        self._sizes: dict[str, int] = {}

    def add(self, blocks: Iterator[tuple[str, np.ndarray]]) -> None:
        """Add an update: for each tensor its key and its changes, in the shape of the tensor."""
        places: dict[str, int] = {}
        with self._file(len(self._places)).open("wb") as file:
            for key, changes in blocks:
                places[key] = file.tell()
                self._sizes[key] = math.prod(changes.shape)
                bounded = np.clip(changes, -LARGEST, LARGEST).astype(np.float32)
                file.write(np.ascontiguousarray(bounded).data)
        self._places.append(places)

    def pieces(self, key: str, among: Collection[int]) -> Iterator[Piece]:
        """Yield the tensor `key` in pieces, for those updates in `among` that contain it."""
        rows = [row for row in among if key in self._places[row]]
        size = self._sizes[key]
        step = max(1, NUMBERS // max(1, len(rows)))
        for start in range(0, size, step):
            stop = min(start + step, size)
            parts = [self._read(row, key, start, stop) for row in rows]
            yield Piece(start, stop, np.stack(parts), np.asarray(rows))

    def close(self) -> None:
        """Delete the files."""
        self._folder.cleanup()

    def _read(self, row: int, key: str, start: int, stop: int) -> np.ndarray:
        offset = self._places[row][key] + 4 * start
        return np.fromfile(self._file(row), np.float32, stop - start, offset=offset)

    def _file(self, row: int) -> Path:
        return Path(self._folder.name) / str(row)
