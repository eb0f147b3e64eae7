"""Counts how well a model predicts the samples of a device on which it does not train."""

import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from device_agent.formats.manifest import Count, Struct
from profiles.errors import UpdateError
from profiles.text_formatting import loss_figure

ROUNDED = 1.001
"""Factor for the rounding of sums that devices compute in float32."""
MOST_CLASSES = 1000
"""With more classes a device reports no counts by class: its record would become too long."""
LARGEST_LOSS = 3.5e38
"""No loss of a label is larger: devices compute losses in float32. Then sums over devices cannot
overflow."""
MOST_EVALUATED = 10**9
"""No device evaluates more samples in a round: the evaluation would take years."""
DIVERGED = "The loss is not finite: training diverged. Lower the learning rate."


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Asks devices to judge the models of a federation (federated evaluation).

    Each device never trains on the `share` of its samples. It evaluates models on these samples and
    sends only counts, see EvaluationCounts. If `by_class` is set and the owner agrees, the device
    also sends the counts of each class.
    """

    share: Annotated[float, Meta(gt=0, le=0.5)]
    by_class: bool = False


class Evaluation(Struct, frozen=True, kw_only=True):
    """The mean `loss` over the labels of some samples, and the number of `correct` predictions.

    `samples` is the number of samples. `counted` is the number of labels that count: samples, or
    positions that are not ignored. Agents before 0.2 do not send `counted`. `correct` is None for a
    regression.
    """

    samples: Count
    loss: float
    correct: Count | None
    counted: Count | None = None

    @property
    def accuracy(self) -> float | None:
        """Share of correct predictions, from 0 to 1; None for a regression or without labels."""
        counted = self.samples if self.counted is None else self.counted
        return self.correct / counted if self.correct is not None and counted else None

    def __str__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.1%}"
        return f"loss {loss_figure(self.loss)}{accuracy}"


class EvaluationCounts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of a model's predictions for samples on which the device never trains.

    Counts can be added up over devices, and they reveal nothing about a single sample.

    Attributes:
        samples: Number of evaluated samples.
        counted: Number of evaluated labels. If each position of a sample has a label, ignored
            positions do not count.
        correct: How many of the evaluated labels are predicted correctly. None for a regression and
            for label sequences (CTC).
        loss_sum: Sum of the loss over the evaluated labels. In a regression, the loss of a sample
            is its mean squared error.
        absolute_sum: For a regression, the sum of the mean absolute errors of the samples. None for
            other models, and for bundles of version 0.2 and before.
        classes: For each class, the number of labels and the number of correctly predicted labels.
            None unless the federation asks for these counts and the owner agrees.
        metrics: For each metric of the loss, by name: the sum of its values over the samples. None
            if the loss has no metrics.
    """

    samples: Count
    counted: Count
    correct: Count | None = None
    loss_sum: float
    absolute_sum: float | None = None
    classes: tuple[tuple[Count, Count], ...] | None = None
    metrics: dict[str, float] | None = None

    @property
    def accuracy(self) -> float | None:
        """The share of labels predicted correctly; None for a regression and for CTC."""
        return None if self.correct is None else self.correct / max(self.counted, 1)

    def means(self) -> Evaluation:
        """The mean loss, with the counts."""
        return Evaluation(
            samples=self.samples,
            loss=self.loss_sum / max(self.counted, 1),
            correct=self.correct,
            counted=self.counted,
        )


class Judgement(Struct, frozen=True, kw_only=True):
    """A device's evaluation of a model that it does not train, on its held-out samples.

    `bundle` is the SHA-256 of the manifest of the evaluated bundle.
    """

    bundle: str
    counts: EvaluationCounts


class LocalEvaluation(Struct, frozen=True, kw_only=True):
    """Evaluations on held-out samples: of the received model, and of the model after training."""

    before: EvaluationCounts
    after: EvaluationCounts


def finite_counts(counts: EvaluationCounts) -> EvaluationCounts:
    """Return `counts` without sums that are not finite, because messages cannot contain them.

    If the loss is not finite, it becomes the largest loss that the labels can have. Without this
    value, a device could not vote against a model that has diverged. Other sums that are not finite
    are left out.

    Examples:
        >>> diverged = EvaluationCounts(samples=2, counted=2, loss_sum=float("nan"))
        >>> finite_counts(diverged).loss_sum
        7e+38
    """
    loss, absolute, metrics = counts.loss_sum, counts.absolute_sum, counts.metrics
    return replace(
        counts,
        loss_sum=loss if math.isfinite(loss) else LARGEST_LOSS * max(counts.counted, 1),
        absolute_sum=absolute if absolute is not None and math.isfinite(absolute) else None,
        metrics=metrics if metrics and all(map(math.isfinite, metrics.values())) else None,
    )


def check_counts(counts: EvaluationCounts, origin: str, *, signed: bool = False) -> None:
    """Raise UpdateError if `counts` are impossible for an evaluation of samples.

    If `signed` is set, the loss may be below zero. Some losses that users write are below zero.
    """
    sums = (counts.loss_sum, *(counts.metrics or {}).values())
    if not all(map(math.isfinite, sums)):
        raise UpdateError(DIVERGED, code="update.diverged")
    problem = _impossible(counts, signed)
    if problem is not None:
        raise UpdateError(
            "{origin} reports counts of its evaluation that are impossible: {problem}. Train the "
            "bundle again.",
            code="update.unusable-evaluation",
            origin=origin,
            problem=problem,
        )


def _impossible(counts: EvaluationCounts, signed: bool) -> str | None:
    """Why no evaluation can have given `counts`; None if one can."""
    if not 1 <= counts.samples <= MOST_EVALUATED:
        return f"{counts.samples:,} samples, but only 1 to {MOST_EVALUATED:,} are possible"
    if counts.correct is not None and counts.correct > counts.counted:
        return f"{counts.correct:,} of {counts.counted:,} labels are correct"
    if counts.loss_sum < 0 and not signed:
        return f"a sum of losses below zero, {counts.loss_sum:g}"
    if abs(counts.loss_sum) > LARGEST_LOSS * max(counts.counted, 1):
        return f"a sum of losses of {counts.loss_sum:g}, which float32 cannot give"
    if counts.absolute_sum is not None:
        # The mean absolute error is at most the root of the mean squared error.
        most = math.sqrt(max(counts.loss_sum, 0.0) * counts.counted)
        if not 0 <= counts.absolute_sum <= ROUNDED * most:
            return (
                f"a sum of absolute errors of {counts.absolute_sum:g}, but at most {most:g} is "
                "possible"
            )
    if counts.classes is None:
        return None
    labels, correct = (sum(pair[column] for pair in counts.classes) for column in (0, 1))
    if (labels, correct) != (counts.counted, counts.correct):
        return "the counts of the classes do not add up to the total counts"
    if any(right > of for of, right in counts.classes):
        return "a class has more correct labels than labels"
    return None
