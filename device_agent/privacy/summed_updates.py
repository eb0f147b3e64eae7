"""An update as the vector that a device adds to a secure sum, and the mean update of a group."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from device_agent.formats.manifest import TensorEntry
from device_agent.formats.protocol.secure_sums import SecureTerms
from device_agent.formats.update import UpdateRecord
from device_agent.privacy.fixed_point import (
    PARTS,
    decoded_counts,
    encoded_counts,
    quantised,
    weighted_sum,
)
from profiles.errors import UpdateError

COUNTS = 6
"""Devices, samples, samples * steps, samples * first and last loss, and clipped elements."""
MOST_LOSS = 1e3
"""Losses are clipped to this size: sums of samples * loss stay below 2^63."""
LOSS_SCALE = 1 << 16
MOST_STEPS = 10**8
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class GroupMean:
    """The mean of the updates of a group.

    Attributes:
        devices: How many devices are in the sum.
        samples: The sum of the devices' samples, each limited to `most_samples`.
        steps: The mean number of steps, weighted by samples.
        loss_first: The mean loss over the first local epoch, weighted by samples.
        loss_last: The same for the last epoch.
        clipped: How many numbers of updates were clipped.
        changes: The mean change of each tensor, weighted by samples, float64.
    """

    devices: int
    samples: int
    steps: float
    loss_first: float
    loss_last: float
    clipped: int
    changes: dict[str, np.ndarray]


def elements(table: Sequence[TensorEntry]) -> int:
    """The number of 32-bit numbers in the vector of an update with these tensors."""
    return sum(math.prod(entry.shape) for entry in table) + COUNTS * PARTS


def update_vector(
    record: UpdateRecord,
    trained: Arrays,
    received: Arrays,
    terms: SecureTerms,
    devices: int,
    seed: int,
) -> np.ndarray:
    """The vector of an update in a group of `devices`, before its masks.

    Args:
        record: The update's record.
        trained: The tensors of the update.
        received: The tensors of the same names that the device received.
        terms: The terms of the sum.
        devices: The size of the group.
        seed: Decides the rounding.

    Returns:
        Shape (elements(record.tensors),), uint32.
    """
    samples, draw = min(record.samples, terms.most_samples), np.random.default_rng(seed)
    weight, clipped = samples / terms.most_samples, 0
    vector = np.empty(elements(record.tensors), np.uint32)
    start = 0
    for entry in record.tensors:
        change = (trained[entry.name].astype(np.float64) - received[entry.name]).ravel()
        part, beyond = quantised(change, weight, terms.most_change, devices, draw)
        vector[start : start + len(part)] = part
        start, clipped = start + len(part), clipped + beyond
    losses = [
        round(samples * LOSS_SCALE * min(max(loss, -MOST_LOSS), MOST_LOSS))
        for loss in (record.loss_first, record.loss_last)
    ]
    steps = samples * min(record.steps, MOST_STEPS)
    vector[start:] = encoded_counts([1, samples, steps, *losses, clipped])
    return vector


def group_mean(
    total: np.ndarray, table: Sequence[TensorEntry], terms: SecureTerms, group: int, devices: int
) -> GroupMean:
    """The mean update of a group, from the sum of its vectors.

    Args:
        total: The sum, without masks.
        table: The tensors of the updates.
        terms: The terms of the sum.
        group: The size of the group, with devices that were lost.
        devices: How many vectors are in the sum.

    Raises:
        UpdateError: The counts are impossible: a device has sent something else than its update.
    """
    counted, samples, steps, first, last, clipped = decoded_counts(total[-COUNTS * PARTS :])
    if counted != devices or not devices <= samples <= devices * terms.most_samples:
        raise UpdateError(
            "A secure sum of {devices} devices counts {counted} devices and {samples} samples, "
            "which is impossible: a device has sent something else than its update.",
            code="update.impossible-sum",
            devices=devices,
            counted=counted,
            samples=samples,
        )
    changes, start = {}, 0
    scale = terms.most_samples / samples  # the weights in the sum are samples / most_samples
    for entry in table:
        size = math.prod(entry.shape)
        part = weighted_sum(total[start : start + size], terms.most_change, group)
        changes[entry.name] = (part * scale).reshape(entry.shape)
        start += size
    return GroupMean(
        devices=devices,
        samples=samples,
        steps=steps / samples,
        loss_first=first / LOSS_SCALE / samples,
        loss_last=last / LOSS_SCALE / samples,
        clipped=clipped,
        changes=changes,
    )
