"""Adds up the counts with which devices judge a model (federated evaluation)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from device_agent.formats.evaluation_counts import EvaluationCounts
from device_agent.formats.protocol.fleet import FederatedEvaluation, KindEvaluation

Counts = Sequence[EvaluationCounts]


@dataclass(frozen=True)
class DeviceCounts:
    """The counts of one device of a kind.

    Attributes:
        kind: The name of its kind.
        before: The counts of the model that the device received.
        after: The counts of its own model after local training. None if the device did not train.
    """

    kind: str
    before: EvaluationCounts
    after: EvaluationCounts | None = None


def federated_evaluation(
    round_: int, devices: Sequence[DeviceCounts]
) -> FederatedEvaluation | None:
    """How `devices` judge the model that they received in round `round_`.

    Devices without a label that counts are left out. Returns None if no device is left.

    Pooled figures are sums over all devices, divided once, so a device with more labels counts
    more. In the mean of devices each device counts once. The order of `devices` does not matter.

    Examples:
        >>> def device(correct, of):
        ...     counts = EvaluationCounts(samples=of, counted=of, correct=correct, loss_sum=1.0)
        ...     return DeviceCounts("board", counts)
        >>> figure = federated_evaluation(1, [device(30, 30), device(0, 10)])
        >>> figure.accuracy, figure.mean_accuracy, figure.worst_accuracy
        (0.75, 0.5, 0.0)
    """
    usable = [device for device in devices if device.before.counted]
    if not usable:
        return None
    received = [device.before for device in usable]
    kinds = sorted({device.kind for device in usable})
    return FederatedEvaluation(
        round=round_,
        **vars(_pooled(usable)),
        mean_accuracy=_mean(received, _accuracy),
        mean_loss=_mean(received, _loss),
        worst_accuracy=_worst(received, _accuracy, lowest=True),
        worst_loss=_worst(received, _loss, lowest=False),
        kinds={kind: _pooled([d for d in usable if d.kind == kind]) for kind in kinds},
        classes=_classes(received),
        reporting_classes=sum(counts.classes is not None for counts in received),
    )


def _pooled(devices: Sequence[DeviceCounts]) -> KindEvaluation:
    """The pooled figures that the fleet and each kind have."""
    received = [device.before for device in devices]
    trained = [device.after for device in devices if device.after is not None]
    return KindEvaluation(
        devices=len(devices),
        samples=sum(counts.samples for counts in received),
        counted=sum(counts.counted for counts in received),
        correct=_correct(received),
        accuracy=_pooled_accuracy(received),
        loss=_pooled_loss(received),
        trained_accuracy=_pooled_accuracy(trained),
        trained_loss=_pooled_loss(trained) if trained else None,
        **_errors(received),
        metrics=_metrics(received),
    )


def _errors(given: Counts) -> dict[str, float]:
    """The pooled RMSE and MAE of a regression; empty unless all devices report their errors."""
    absolute = [counts.absolute_sum for counts in given if counts.absolute_sum is not None]
    if not absolute or len(absolute) < len(given):
        return {}
    counted = sum(counts.counted for counts in given)
    return {"rmse": math.sqrt(_pooled_loss(given)), "mae": math.fsum(absolute) / counted}


def _metrics(given: Counts) -> dict[str, float] | None:
    """The pooled metrics of the loss; None unless all devices report them."""
    names = set.intersection(*(set(counts.metrics or {}) for counts in given))
    samples = sum(counts.samples for counts in given)
    pooled = {
        name: math.fsum((counts.metrics or {})[name] for counts in given) / samples
        for name in sorted(names)
    }
    return pooled or None


def _correct(given: Counts) -> int | None:
    """The sum of correct labels; None for a regression."""
    known = [counts.correct for counts in given if counts.correct is not None]
    return sum(known) if known and len(known) == len(given) else None


def _pooled_accuracy(given: Counts) -> float | None:
    correct = _correct(given)
    return None if correct is None else correct / sum(counts.counted for counts in given)


def _pooled_loss(given: Counts) -> float:
    # An exact sum: the order of the devices does not matter.
    return math.fsum(counts.loss_sum for counts in given) / sum(c.counted for c in given)


def _accuracy(counts: EvaluationCounts) -> float | None:
    return None if counts.correct is None else counts.correct / counts.counted


def _loss(counts: EvaluationCounts) -> float:
    return counts.loss_sum / counts.counted


Figure = Callable[[EvaluationCounts], float | None]


def _of_devices(given: Counts, figure: Figure) -> list[float]:
    """The `figure` of each device, ascending; empty if a device has no such figure."""
    values = [value for counts in given if (value := figure(counts)) is not None]
    return sorted(values) if len(values) == len(given) else []


def _mean(given: Counts, figure: Figure) -> float | None:
    values = _of_devices(given, figure)
    return math.fsum(values) / len(values) if values else None


def _worst(given: Counts, figure: Figure, *, lowest: bool) -> float | None:
    """The mean of `figure` over the worst tenth of the devices, at least one."""
    values = _of_devices(given, figure)
    tenth = math.ceil(len(values) / 10)
    worst = values[:tenth] if lowest else values[len(values) - tenth :]
    return math.fsum(worst) / tenth if worst else None


def _classes(given: Counts) -> list[tuple[int, int]] | None:
    """Labels and correct labels of each class, over the devices that report them, if any."""
    reported = [counts.classes for counts in given if counts.classes is not None]
    if not reported:
        return None
    return [
        (sum(labels for labels, _ in same), sum(correct for _, correct in same))
        for same in zip(*reported, strict=True)
    ]
