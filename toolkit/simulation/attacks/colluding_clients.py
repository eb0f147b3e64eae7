"""Attacks by hostile clients that know each other's samples.

Each client trains its own submodel on the samples of several hostile clients. So the client knows
their honest updates of this submodel. w is the tensor that the client received, and s is the
strength.
"""

import numpy as np

from device_agent.formats.manifest import TensorEntry
from toolkit.aggregation.recover import Received
from toolkit.simulation.attacks.attack import Trained, forged


def little_is_enough(trained: Trained) -> Received:
    """Send mean - s * deviation of the known updates, for each number (Baruch et al. 2019)."""

    def value(entry: TensorEntry) -> np.ndarray:
        known = _known(trained, entry)
        return np.asarray(known.mean(0) - trained.strength * known.std(0))

    return forged(trained, value)


def inner_product(trained: Trained) -> Received:
    """Send the reversed mean of the known changes, w - s mean(v - w) (Xie et al. 2020)."""

    def value(entry: TensorEntry) -> np.ndarray:
        received = trained.received[entry.name]
        mean = (_known(trained, entry) - received).mean(0)
        return np.asarray(received - trained.strength * mean)

    return forged(trained, value)


def _known(trained: Trained, entry: TensorEntry) -> np.ndarray:
    return np.stack([tensors[entry.name] for tensors in trained.known]).astype(np.float64)
