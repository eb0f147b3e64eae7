"""Sums to which a device has added something else than its update."""

from dataclasses import replace

import numpy as np
import pytest

from device_agent.formats.manifest import TensorEntry
from device_agent.formats.protocol.secure_sums import SecureTerms, SumPrivacy
from device_agent.privacy.fixed_point import encoded_counts
from device_agent.privacy.summed_updates import EVALUATED, LOSS_SCALE, GroupMean, group_mean
from refusals import refused

TERMS = SecureTerms(fewest=3, most_change=1.0, most_samples=100)
TABLE = (TensorEntry(name="w", role="parameter", dtype="float32", shape=(4,)),)
DEVICES, SAMPLES = 5, 200
HONEST = [DEVICES, SAMPLES, SAMPLES * 3, SAMPLES * 2 * LOSS_SCALE, -SAMPLES * LOSS_SCALE, 7]
HONEST += [0] * 2 * EVALUATED


def mean_of(counts: list[int]) -> GroupMean:
    total = np.concatenate([np.zeros(4, np.uint32), encoded_counts(counts)])
    return group_mean(total, TABLE, TERMS, DEVICES, DEVICES)


def test_possible_counts() -> None:
    mean = mean_of(HONEST)
    assert (mean.samples, mean.steps, mean.loss_first, mean.loss_last) == (SAMPLES, 3, 2, -1)
    assert mean.clipped == 7


@pytest.mark.parametrize("place", range(len(HONEST)))
def test_sums_with_noise_count_devices_only(place: int) -> None:
    """Otherwise one device could write losses and an evaluation that nobody asked for."""
    private = replace(TERMS, most_samples=1, privacy=SumPrivacy(clip=1.0, noise_multiplier=1.0))
    counts = [DEVICES, DEVICES, *[0] * (len(HONEST) - 2)]

    def mean() -> GroupMean:
        total = np.concatenate([np.zeros(4, np.uint32), encoded_counts(counts)])
        return group_mean(total, TABLE, private, DEVICES, DEVICES)

    assert (mean().samples, mean().evaluating) == (DEVICES, 0)
    counts[place] += 1
    with refused("update.impossible-sum"):
        mean()


@pytest.mark.parametrize(
    ("place", "count"),
    [
        (0, 4), (1, 4), (1, 501), (1, -3), (2, -1), (2, 2**62), (3, 2**62), (3, -(2**62)),
        (4, 2**50), (5, -1), (5, DEVICES * 4 + 1), (6, DEVICES + 1),
    ],
)  # fmt: skip
def test_impossible_counts_end_the_sum(place: int, count: int) -> None:
    """Otherwise one device could set the losses and steps that the operator sees."""
    counts = HONEST.copy()
    counts[place] = count
    with refused("update.impossible-sum"):
        mean_of(counts)
