"""The figures of an evaluation, and the sums over batches that they are computed from."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from device_agent.formats.evaluation_counts import MOST_CLASSES
from device_agent.formats.label_rule import IGNORED, count_labels
from device_agent.formats.protocol.fleet import HeldOutFigures
from exporters.programs.training.losses import Objective

logger = logging.getLogger(__name__)

GROUPS = 100
"""About how many groups of samples have their own loss: enough for a standard error."""


@dataclass(frozen=True)
class Evaluation:
    """Accuracy, loss and errors of a model.

    Attributes:
        samples: How many samples were evaluated.
        counted: How many labels count for the accuracy and the loss. A sample has one label, or one
            for each position with a class.
        accuracy: Share of labels predicted correctly, from 0 to 1; None for a regression and for
            label sequences (CTC).
        loss: Mean loss of the labels that count.
        classes: For each class, its number of labels and how many of them are predicted correctly.
            None if there is no accuracy, or if there are more than 1,000 classes.
        confusion: The confusion matrix, int64 (classes, classes): how many labels of the class of
            the row are predicted as the class of the column. None if `classes` is None.
        rmse: Root of the mean squared error over all numbers of a regression; else None.
        mae: Mean absolute error over all numbers of a regression; else None.
        metrics: Means of other figures that the loss computes for each sample, by name.
        groups: The losses of groups of samples, float64 (groups, 2): the sum over the labels of a
            group, and the number of these labels. Two models that are evaluated on the same samples
            have the same groups, so their losses can be compared in pairs. None if not known.
    """

    samples: int
    counted: int
    accuracy: float | None
    loss: float
    classes: tuple[tuple[int, int], ...] | None = None
    confusion: np.ndarray | None = field(default=None, compare=False, repr=False)
    rmse: float | None = None
    mae: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    groups: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def figures(self) -> HeldOutFigures | None:
        """The figures to store in addition to accuracy and loss; None if there are none."""
        if self.classes is None and self.rmse is None and not self.metrics:
            return None
        classes = None if self.classes is None else list(self.classes)
        return HeldOutFigures(
            classes=classes, rmse=self.rmse, mae=self.mae, metrics=self.metrics or None
        )


class EvaluationSums:
    """Sums over the batches of `samples` samples: confusion matrix, errors, losses of groups."""

    def __init__(self, goal: Objective, samples: int) -> None:
        self._goal = goal
        self._size = math.ceil(samples / GROUPS)
        self._groups: list[tuple[float, int]] | None = []
        self._classes = 1 + (goal.labels.highest or 0)
        # The last column counts outputs that are not numbers, for which no class is predicted.
        size = (self._classes, self._classes + 1) if self._classes <= MOST_CLASSES else (0, 0)
        self._confusion = np.zeros(size, np.int64)
        self._right, self._absolute, self._numbers = 0, 0.0, 0
        self._metrics: dict[str, float] = {}

    def add(self, output: torch.Tensor, labels: np.ndarray) -> None:
        """Add a batch."""
        self._add_groups(output, labels)
        if self._goal.predicted is not None:
            predicted = self._goal.predicted(output).numpy().astype(np.int64)
            self._right += int((predicted == labels).sum())
            if self._confusion.size:
                counts = labels != IGNORED
                pairs = labels[counts] * (self._classes + 1) + predicted[counts]
                sums = np.bincount(pairs, minlength=self._confusion.size)
                self._confusion += sums.reshape(self._confusion.shape)
        elif self._goal.absolute is not None:
            self._absolute += float((output - torch.from_numpy(labels)).abs().sum())
            self._numbers += labels.size
        target = torch.from_numpy(labels)
        for name, measure in self._goal.metrics.items():
            own = float(measure(output, target)) * len(labels)
            self._metrics[name] = self._metrics.get(name, 0.0) + own

    def _add_groups(self, output: torch.Tensor, labels: np.ndarray) -> None:
        """Add the losses of the groups of a batch, unless the loss cannot take so few samples."""
        for start in range(0, len(labels), self._size):
            part = slice(start, start + self._size)
            count = count_labels(labels[part])
            try:
                loss = float(self._goal.loss(output[part], torch.from_numpy(labels[part])))
            except Exception as error:  # the user's own loss may raise anything
                logger.debug("Groups of samples have no losses: %s", error)
                self._groups = None
            if self._groups is None:
                return
            self._groups.append((loss * count if count else 0.0, count))

    def _group_losses(self) -> np.ndarray | None:
        return None if self._groups is None else np.array(self._groups).reshape(-1, 2)

    def evaluation(self, samples: int, counted: int, loss_sum: float) -> Evaluation:
        """The evaluation of all batches."""
        loss = loss_sum / counted
        metrics = {name: total / samples for name, total in self._metrics.items()}
        known = partial(Evaluation, samples, counted, metrics=metrics, groups=self._group_losses())
        if self._goal.predicted is None:
            if not self._numbers:
                return known(None, loss)
            mae = self._absolute / self._numbers
            return known(None, loss, rmse=math.sqrt(loss), mae=mae)
        accuracy, classes = self._right / counted, self._confusion[:, :-1]
        if not self._confusion.size:
            return known(accuracy, loss)
        labels, correct = self._confusion.sum(1).tolist(), classes.diagonal().tolist()
        by_class = tuple(zip(labels, correct, strict=True))
        return known(accuracy, loss, by_class, classes)


def mean_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The mean of evaluations of several models on the same samples.

    The counts of classes are sums, so that the accuracy of a class is the mean over the models.
    """
    first = evaluations[0]
    confusions = [own.confusion for own in evaluations if own.confusion is not None]
    counts = [own.classes for own in evaluations if own.classes is not None]
    return Evaluation(
        first.samples,
        first.counted,
        _mean([own.accuracy for own in evaluations]),
        float(np.mean([own.loss for own in evaluations])),
        tuple(map(tuple, np.sum(counts, axis=0).tolist())) if counts else None,
        np.sum(confusions, axis=0) if confusions else None,
        rmse=_mean([own.rmse for own in evaluations]),
        mae=_mean([own.mae for own in evaluations]),
        metrics={
            name: float(np.mean([own.metrics[name] for own in evaluations]))
            for name in first.metrics
        },
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
