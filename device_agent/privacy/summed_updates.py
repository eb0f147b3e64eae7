"""Converts an update to the vector for a secure sum, and the sum to the mean update of a group."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import UnsetType

from device_agent.formats.evaluation_counts import EvaluationCounts, LocalEvaluation
from device_agent.formats.manifest import TensorEntry
from device_agent.formats.protocol.secure_sums import SecureTerms
from device_agent.formats.update import UpdateRecord
from device_agent.privacy.factor_products import summed_table, summed_tensors
from device_agent.privacy.fixed_point import (
    PARTS,
    decoded_counts,
    encoded_counts,
    quantised,
    weighted_sum,
)
from device_agent.privacy.gaussian_noise import secure_bytes
from device_agent.privacy.noised_change import largest, noised_numbers
from profiles.errors import UpdateError

COUNTS = 6
"""Devices, samples, samples * steps, samples * first and last loss, and clipped elements."""
EVALUATED = 8
"""For each of the received and the trained model: devices that evaluated it, samples, labels, how
many devices count correct labels, correct labels, loss, how many devices sum absolute errors, and
absolute errors."""
PARTS_OF_COUNTS = PARTS * (COUNTS + 2 * EVALUATED)
MOST_COUNT, MOST_SUM = 2**46, 2.0**36
SUM_SCALE = 1 << 10
"""Sums of losses and errors are rounded to this part of one, and clipped to MOST_SUM."""
MOST_LOSS = 1e3
"""Losses are clipped to this size: sums of samples * loss stay below 2^63."""
LOSS_SCALE = 1 << 16
MOST_STEPS = 10**8
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class GroupMean:
    """The mean of the updates of a group.

    Attributes:
        samples: The sum of the devices' numbers of samples, each limited to `most_samples`.
        steps: The mean number of steps, weighted by samples.
        loss_first: The mean loss over the first local epoch, weighted by samples.
        loss_last: The mean loss over the last local epoch, weighted by samples.
        clipped: How many numbers of updates were clipped.
        changes: The mean change of each tensor of the sum (`summed_table`), weighted by samples,
            float64.
        evaluating: How many devices evaluated the models.
        before: The sums of these devices' counts of the received model; None if no device
            evaluated.
        after: The sums of these devices' counts of the models after local training.
    """

    samples: int
    steps: float
    loss_first: float
    loss_last: float
    clipped: int
    changes: dict[str, np.ndarray]
    evaluating: int
    before: EvaluationCounts | None
    after: EvaluationCounts | None


def elements(table: Sequence[TensorEntry]) -> int:
    """The number of 32-bit numbers in the vector of an update with these tensors."""
    return sum(math.prod(entry.shape) for entry in summed_table(table)) + PARTS_OF_COUNTS


def update_vector(
    record: UpdateRecord,
    trained: Arrays,
    received: Arrays,
    terms: SecureTerms,
    devices: int,
    seed: int | Sequence[int],
) -> np.ndarray:
    """The vector of an update in a group of `devices`, before its masks.

    Args:
        record: The update's record.
        trained: The tensors of the update.
        received: The tensors of the same names that the device received.
        terms: The terms of the sum.
        devices: The size of the group.
        seed: The seed for the rounding, if the sum has no differential privacy.

    Returns:
        Shape (elements(record.tensors),), uint32.
    """

    def changes() -> Iterator[np.ndarray]:
        pair = summed_tensors(trained, record.tensors), summed_tensors(received, record.tensors)
        for after, before in zip(*pair, strict=True):
            yield after - before

    if terms.privacy is not None:
        numbers = noised_numbers(changes, terms, terms.privacy, devices, secure_bytes)
        counts = [1, 1, *[0] * (COUNTS + 2 * EVALUATED - 2)]
        return np.concatenate([numbers, encoded_counts(counts)])
    samples, draw = min(record.samples, terms.most_samples), np.random.default_rng(seed)
    weight, clipped = samples / terms.most_samples, 0
    vector = np.empty(elements(record.tensors), np.uint32)
    start = 0
    for change in changes():
        part, beyond = quantised(change.ravel(), weight, terms.most_change, devices, draw)
        vector[start : start + len(part)] = part
        start, clipped = start + len(part), clipped + beyond
    losses = [
        round(samples * LOSS_SCALE * min(max(loss, -MOST_LOSS), MOST_LOSS))
        for loss in (record.loss_first, record.loss_last)
    ]
    steps = samples * min(record.steps, MOST_STEPS)
    vector[start:] = encoded_counts(
        [1, samples, steps, *losses, clipped, *_evaluation_counts(record.evaluation)]
    )
    return vector


def _evaluation_counts(evaluation: LocalEvaluation | UnsetType) -> list[int]:
    """The counts of both models; zeros if the device has not evaluated them."""
    if isinstance(evaluation, UnsetType):
        return [0] * (2 * EVALUATED)
    found = []
    for counts in (evaluation.before, evaluation.after):
        absolute = counts.absolute_sum
        found += [
            1,
            min(counts.samples, MOST_COUNT),
            min(counts.counted, MOST_COUNT),
            int(counts.correct is not None),
            min(counts.correct or 0, MOST_COUNT),
            _fixed(counts.loss_sum),
            int(absolute is not None),
            _fixed(absolute or 0.0),
        ]
    return found


def _fixed(number: float) -> int:
    return round(SUM_SCALE * min(max(number, -MOST_SUM), MOST_SUM))


def _evaluation_sums(counts: Sequence[int]) -> EvaluationCounts | None:
    """The sums of one model; None if no device evaluated it, or if they are impossible."""
    devices, samples, labels, counting, correct, loss, summing, absolute = counts
    known = EvaluationCounts(
        samples=samples,
        counted=labels,
        correct=correct if counting == devices else None,
        loss_sum=loss / SUM_SCALE,
        absolute_sum=absolute / SUM_SCALE if summing == devices else None,
    )
    possible = 0 < devices <= samples and 0 <= (known.correct or 0) <= labels and labels > 0
    return known if possible else None


def group_mean(
    total: np.ndarray, table: Sequence[TensorEntry], terms: SecureTerms, group: int, devices: int
) -> GroupMean:
    """The mean update of a group, from the sum of its vectors.

    Args:
        total: The sum, without masks.
        table: The tensors of the updates.
        terms: The terms of the sum.
        group: The size of the group, including lost devices.
        devices: The number of vectors in the sum.

    Raises:
        UpdateError: The counts are impossible: a device did not send its real update.
    """
    counts = decoded_counts(total[-PARTS_OF_COUNTS:])
    counted, samples, steps, first, last, clipped = counts[:COUNTS]
    most_loss = samples * LOSS_SCALE * MOST_LOSS + devices
    possible = (
        counted == devices
        and devices <= samples <= devices * terms.most_samples
        and 0 <= steps <= samples * MOST_STEPS
        and max(abs(first), abs(last)) <= most_loss
        and 0 <= clipped <= devices * (len(total) - PARTS_OF_COUNTS)
        and 0 <= counts[COUNTS] <= devices
    )
    if terms.privacy is not None:
        possible = counts == [devices, devices, *[0] * (len(counts) - 2)]
    if not possible:
        raise UpdateError(
            "A secure sum of {devices} devices is impossible: at least one device did not send its "
            "real update. The sum counts {counted} devices, {samples} samples and {steps:g} steps. "
            "The first loss is {first:g}, the last loss {last:g}; {clipped} numbers were clipped.",
            code="update.impossible-sum",
            devices=devices,
            counted=counted,
            samples=samples,
            steps=steps / max(samples, 1),
            first=first / LOSS_SCALE / max(samples, 1),
            last=last / LOSS_SCALE / max(samples, 1),
            clipped=clipped,
        )
    changes, start = {}, 0
    scale = terms.most_samples / samples  # the weights in the sum are samples / most_samples
    most = largest(terms, group)
    for entry in summed_table(table):
        size = math.prod(entry.shape)
        part = weighted_sum(total[start : start + size], most, group)
        changes[entry.name] = (part * scale).reshape(entry.shape)
        start += size
    return GroupMean(
        samples=samples,
        steps=steps / samples,
        loss_first=first / LOSS_SCALE / samples,
        loss_last=last / LOSS_SCALE / samples,
        clipped=clipped,
        changes=changes,
        evaluating=counts[COUNTS],
        before=_evaluation_sums(counts[COUNTS : COUNTS + EVALUATED]),
        after=_evaluation_sums(counts[COUNTS + EVALUATED :]),
    )
