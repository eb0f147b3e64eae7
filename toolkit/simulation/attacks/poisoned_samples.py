"""Attacks that poison the samples of a client before its training."""

from dataclasses import replace

import numpy as np

from device_agent.data.local_data import LocalData
from toolkit.simulation.attacks.attack import Poison

TARGET = 0
"""The class that a backdoor wants for every sample with its trigger."""


def flipped_labels(data: LocalData, poison: Poison) -> LocalData:
    """Replace each label y by highest - y (Fang et al. 2020). Ignored labels stay."""
    y = data.labels(np.arange(len(data)))
    return replace(data, y=np.where(y >= 0, poison.highest - y, y))


def backdoored(data: LocalData, poison: Poison) -> LocalData:
    """Give every second sample the trigger and the label TARGET (Gu et al. 2017)."""
    rows = np.arange(len(data))
    x, y = data.samples(rows).copy(), data.labels(rows).copy()
    x[::2] = with_trigger(x[::2], poison.trigger)
    y[::2] = TARGET
    return replace(data, x=x, y=y, mapped=())


def with_trigger(x: np.ndarray, value: float) -> np.ndarray:
    """Copies of the samples `x` (n, ...) with the trigger: a corner where each number is `value`.

    The corner is the last quarter of each of the last two axes of a sample, at least one number
    long. If samples have one axis, the corner is the last quarter of this axis.
    """
    marked = x.copy()
    leading = [slice(None)] * max(1, x.ndim - 2)
    corner = [slice(-max(1, size // 4), None) for size in x.shape[len(leading) :]]
    marked[tuple(leading + corner)] = value
    return marked


def backdoor_samples(
    x: np.ndarray, y: np.ndarray, trigger: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Held-out samples with the trigger, and TARGET as their labels; None if none are left.

    Samples of the class TARGET are left out. The accuracy on the rest is the backdoor's success.
    """
    others = y != TARGET
    if not others.any():
        return None
    return with_trigger(x[others], trigger), np.full_like(y[others], TARGET)
