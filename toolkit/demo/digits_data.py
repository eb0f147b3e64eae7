"""The digits of scikit-learn, split unevenly over the devices: by label, as FL papers do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from profiles.errors import InputError

LEAST = 2
"""The fewest samples of a device: batch norm cannot train on a single sample."""
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


def split_samples(
    labels: np.ndarray, devices: int, held_out: float, alpha: float, seed: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Split samples into held-out ones and a part for each device.

    Args:
        labels: The labels of all samples (n,).
        devices: The number of devices.
        held_out: The share of the samples that no device gets, from 0 to 1.
        alpha: Dirichlet concentration; the smaller, the fewer classes a device gets.
        seed: Seed of the split.

    Returns:
        Indices of the held-out samples, and of each device's samples.
    """
    order = np.random.default_rng(seed)
    mixed = order.permutation(len(labels))
    kept = round(held_out * len(labels))
    rest = mixed[kept:]
    parts = dirichlet_split(labels[rest], devices, alpha, order)
    return mixed[:kept], [rest[part] for part in parts]


def dirichlet_split(
    labels: np.ndarray, devices: int, alpha: float, order: np.random.Generator
) -> list[np.ndarray]:
    """Give each device a Dirichlet share of the samples of every label.

    Each sample goes to exactly one device, and each device gets at least `LEAST` samples.

    Returns:
        For each device, indices into `labels` (n,).

    Raises:
        InputError: There are fewer than `LEAST` samples for each device.
    """
    if len(labels) < LEAST * devices:
        raise InputError(
            f"{len(labels)} samples are too few for {devices} devices: each needs {LEAST}.",
            code="demo.too-few-samples",
            samples=len(labels),
            devices=devices,
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
    """Move samples from the largest part to every part with fewer than `LEAST`."""
    parts = list(parts)
    while min(map(len, parts)) < LEAST:
        sizes = [len(part) for part in parts]
        poor, rich = int(np.argmin(sizes)), int(np.argmax(sizes))
        parts[poor] = np.append(parts[poor], parts[rich][-1])
        parts[rich] = parts[rich][:-1]
    return parts
