"""The digits of scikit-learn, split unevenly over the devices: by label, as FL papers do."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from toolkit.simulation import digits as scans
from toolkit.simulation.partition import dirichlet_split


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
    return Samples(*scans.digits())


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
