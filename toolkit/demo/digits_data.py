"""The digits of scikit-learn, dealt out to the devices unevenly: by label, as FL papers do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from profiles.errors import InputError

LEAST = 2
"""Samples that every device gets: a batch norm cannot train on one."""
WHITE = 16.0
"""The brightest value in the scans."""


@dataclass(frozen=True)
class Samples:
    """Images `x` (n, 1, 8, 8) float32 from 0 to 1, labels `y` (n,) int64."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, indices: np.ndarray) -> "Samples":
        return Samples(self.x[indices], self.y[indices])

    def save(self, path: Path) -> None:
        """Write the `.npz` file that devices and coordinator read."""
        np.savez(path, x=self.x, y=self.y)


def digits() -> Samples:
    """All 1,797 scans."""
    x, y = load_digits(return_X_y=True)
    return Samples((x / WHITE).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64))


def deal(
    labels: np.ndarray, devices: int, held_out: float, alpha: float, seed: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Indices of the held-out share of `labels` (n,), and of each device's part of the rest."""
    order = np.random.default_rng(seed)
    mixed = order.permutation(len(labels))
    kept = round(held_out * len(labels))
    rest = mixed[kept:]
    parts = dirichlet_split(labels[rest], devices, alpha, order)
    return mixed[:kept], [rest[part] for part in parts]


def dirichlet_split(
    labels: np.ndarray, devices: int, alpha: float, order: np.random.Generator
) -> list[np.ndarray]:
    """Indices into `labels` (n,) for each device: every label's samples in Dirichlet shares.

    Each sample goes to one device, and each device gets at least `LEAST`. Raises InputError where
    there are too few for that.
    """
    if len(labels) < LEAST * devices:
        raise InputError(
            f"{len(labels)} samples are too few for {devices} devices: each needs {LEAST}."
        )
    pieces: list[list[np.ndarray]] = [[] for _ in range(devices)]
    for label in np.unique(labels):
        found = order.permutation(np.flatnonzero(labels == label))
        shares = order.dirichlet(np.full(devices, alpha))
        cuts = np.round(np.cumsum(shares)[:-1] * len(found)).astype(int)
        for piece, part in zip(pieces, np.split(found, cuts), strict=True):
            piece.append(part)
    return _level([np.concatenate(piece) for piece in pieces])


def _level(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`parts` with samples moved from the largest to those below `LEAST`."""
    parts = list(parts)
    while min(map(len, parts)) < LEAST:
        sizes = [len(part) for part in parts]
        poor, rich = int(np.argmin(sizes)), int(np.argmax(sizes))
        parts[poor] = np.append(parts[poor], parts[rich][-1])
        parts[rich] = parts[rich][:-1]
    return parts
