"""The digits of scikit-learn, split unevenly by label over the devices, as in many papers."""

from collections.abc import Sequence

import numpy as np

from toolkit.demo import demo_settings
from toolkit.demo.demo_folder import DemoFolder
from toolkit.simulation.digits import digits
from toolkit.simulation.partition import dirichlet_split


def write_data(folder: DemoFolder, devices: Sequence[str], seed: int) -> tuple[int, list[int]]:
    """Write the `.npz` files of the coordinator and of the `devices`.

    Returns how many samples are held out, and how many samples each device has.
    """
    x, y = digits()
    held_out, parts = split_samples(
        y, len(devices), demo_settings.HELD_OUT, demo_settings.ALPHA, seed
    )
    np.savez(folder.held_out, x=x[held_out], y=y[held_out])
    for device, part in zip(devices, parts, strict=True):
        np.savez(folder.data_of(device), x=x[part], y=y[part])
    return len(held_out), [len(part) for part in parts]


def split_samples(
    labels: np.ndarray, devices: int, held_out: float, alpha: float, seed: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Split samples into held-out samples and a part for each device.

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
