"""Attacks that change an update after an honest training.

In the formulas, w is the tensor that the client received, v the trained tensor, and s the strength.
The formulas apply to each uploaded tensor. A factorized tensor is uploaded as several factors.
"""

from zlib import crc32

import numpy as np
from msgspec.structs import replace

from device_agent.formats.manifest import TensorEntry
from device_agent.formats.update import MOST_SAMPLES
from toolkit.aggregation.recover import Received
from toolkit.aggregation.update_validation import is_statistic
from toolkit.simulation.attacks.attack import Trained, forged, rms


def sign_flip(trained: Trained) -> Received:
    """Reverse the change: w - s (v - w). Li et al. 2019 (RSA)."""
    return _scaled(trained, -trained.strength)


def scale(trained: Trained) -> Received:
    """Enlarge the change: w + s (v - w), as in model replacement (Bagdasaryan et al. 2020)."""
    return _scaled(trained, trained.strength)


def reverse_scale(trained: Trained) -> Received:
    """Send the reversed model: -s v. For a factorized tensor, only one factor is multiplied.

    Otherwise the signs of two factors would cancel. Statistics of batch norm stay as they are.
    """
    entries = trained.update[0].tensors
    first = {entry.stands_for: entry.name for entry in reversed(entries)}

    def value(entry: TensorEntry) -> np.ndarray:
        own = trained.update[1][entry.name]
        parts = entry.factor is not None and first[entry.stands_for] != entry.name
        return own if parts or is_statistic(entry.stands_for or "") else -trained.strength * own

    return forged(trained, value)


def noise(trained: Trained) -> Received:
    """Send noise in place of the change: w + s rms(v - w) N(0, 1)."""

    def value(entry: TensorEntry) -> np.ndarray:
        change = trained.change(entry.name)
        drawn = trained.draw.standard_normal(change.shape)
        return np.asarray(trained.received[entry.name] + trained.strength * rms(change) * drawn)

    return forged(trained, value)


def drift(trained: Trained) -> Received:
    """Add a step that all hostile clients take in each round: v + s rms(v - w) d.

    The signs d are drawn once for the whole simulation, so that small steps add up.
    """

    def value(entry: TensorEntry) -> np.ndarray:
        change = trained.change(entry.name)
        draw = np.random.default_rng([trained.seed, crc32(entry.name.encode())])
        signs = draw.choice([-1.0, 1.0], change.shape)
        return np.asarray(trained.update[1][entry.name] + trained.strength * rms(change) * signs)

    return forged(trained, value)


def many_samples(trained: Trained) -> Received:
    """Reverse the change, w - (v - w), and claim s samples. The checks accept at most 10^12."""
    record, tensors = _scaled(trained, -1.0)
    return replace(record, samples=min(max(1, int(trained.strength)), MOST_SAMPLES)), tensors


def claim(trained: Trained) -> Received:
    """Send the unchanged update, and claim s times as many samples."""
    record, tensors = trained.update
    claimed = min(max(1, int(trained.strength * record.samples)), MOST_SAMPLES)
    return replace(record, samples=claimed), tensors


def statistics(trained: Trained) -> Received:
    """Multiply batch norm's means and variances by s. Everything else is honest."""

    def value(entry: TensorEntry) -> np.ndarray:
        own = trained.update[1][entry.name]
        return trained.strength * own if is_statistic(entry.stands_for or "") else own

    return forged(trained, value)


def single_tensor(trained: Trained) -> Received:
    """Set one number of the last parameter to s: mostly a bias of the classifier.

    With a masked loss, this is the bias of a class that occurs in the client's samples, because
    the biases of other classes are not averaged.
    """
    record = trained.update[0]
    last = [entry for entry in record.tensors if entry.role == "parameter"][-1]

    def value(entry: TensorEntry) -> np.ndarray:
        own = trained.update[1][entry.name]
        if entry is last:
            own = own.copy()
            row = record.classes[0] if entry.by_class and record.classes else 0
            own.reshape(len(own) if own.ndim else 1, -1)[row, 0] = trained.strength
        return own

    return forged(trained, value)


def zeros(trained: Trained) -> Received:
    """Send 0 for every number."""
    return forged(trained, lambda entry: np.zeros_like(trained.update[1][entry.name]))


def _scaled(trained: Trained, factor: float) -> Received:
    return forged(
        trained, lambda entry: trained.received[entry.name] + factor * trained.change(entry.name)
    )
