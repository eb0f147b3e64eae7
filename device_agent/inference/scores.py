"""Scores the predictions of a model for labelled samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from device_agent.formats.evaluation_counts import EvaluationCounts
from device_agent.formats.label_rule import IGNORED, class_axis
from device_agent.formats.manifest import Output

LEAST = 1e-38
"""Smaller probabilities are raised to this value before their logarithm is taken."""


@dataclass(frozen=True)
class Scores:
    """The score of each sample, shape (n,).

    Attributes:
        counted: How many labels of the sample count.
        correct: How many of the labels that count are predicted correctly; None for a regression
            and for sequences.
        loss: Sum of the losses of the labels that count.
    """

    counted: np.ndarray
    correct: np.ndarray | None
    loss: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> "Scores":
        """The scores of several batches."""
        if not parts:
            return cls(np.empty(0, np.int64), None, np.empty(0))
        corrects = [part.correct for part in parts if part.correct is not None]
        return cls(
            np.concatenate([part.counted for part in parts]),
            np.concatenate(corrects) if corrects else None,
            np.concatenate([part.loss for part in parts]),
        )

    def counts(self) -> EvaluationCounts:
        """The sums over all samples."""
        return EvaluationCounts(
            samples=len(self.counted),
            counted=int(self.counted.sum()),
            correct=None if self.correct is None else int(self.correct.sum()),
            loss_sum=float(self.loss.sum()),
        )


def scores_of(meaning: Output, predicted: np.ndarray, y: np.ndarray) -> Scores:
    """The scores of samples with the labels `y`; `predicted` is from `Predictor.predict`."""
    if meaning == "numbers":
        return number_scores(predicted, y)
    if meaning == "independent":
        return answer_scores(predicted, y)
    return (sequence_scores if meaning == "ctc" else class_scores)(predicted, y)


def class_scores(probabilities: np.ndarray, y: np.ndarray) -> Scores:
    """The scores of a classification.

    Args:
        probabilities: Shape (n, classes), (n, t, classes) or (n, classes, h, w).
        y: Classes, shape (n,), (n, t) or (n, h, w). Labels that are IGNORED do not count.
    """
    axis = class_axis(probabilities.ndim)
    counts = y != IGNORED
    index = np.expand_dims(np.where(counts, y, 0), axis)
    likely = np.take_along_axis(probabilities, index, axis).squeeze(axis).astype(np.float64)
    right = (probabilities.argmax(axis) == y) & counts
    losses = np.where(counts, -np.log(np.maximum(likely, LEAST)), 0)
    return Scores(_sums(counts), _sums(right), _sums(losses))


def answer_scores(probabilities: np.ndarray, y: np.ndarray) -> Scores:
    """The scores of several yes-or-no answers for each sample (multi-label).

    Args:
        probabilities: Probabilities of yes, in the shape of the labels.
        y: Labels 0 or 1. Labels that are IGNORED do not count.
    """
    counts = y != IGNORED
    likely = np.where(y == 1, probabilities, 1 - probabilities.astype(np.float64))
    right = ((probabilities > 0.5) == (y == 1)) & counts
    losses = np.where(counts, -np.log(np.maximum(likely, LEAST)), 0)
    return Scores(_sums(counts), _sums(right), _sums(losses))


def number_scores(output: np.ndarray, y: np.ndarray) -> Scores:
    """The scores of a regression: the loss of a sample is its mean squared error."""
    squares = (output.astype(np.float64) - y) ** 2
    losses = squares.reshape(len(y), -1).mean(1)
    return Scores(np.ones(len(y), np.int64), None, losses)


def sequence_scores(probabilities: np.ndarray, y: np.ndarray) -> Scores:
    """The scores of label sequences: the loss of connectionist temporal classification (CTC).

    Args:
        probabilities: Shape (n, t, symbols); symbol 0 is the blank.
        y: Symbols, shape (n, most). After the end of a sequence, all symbols are IGNORED.
    """
    losses = [
        _ctc(p, labels[labels != IGNORED]) for p, labels in zip(probabilities, y, strict=True)
    ]
    return Scores(_sums(y != IGNORED), None, np.array(losses))


def _ctc(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Compute -log p(labels) by the forward recursion of Graves et al. 2006, equations 6 to 8."""
    logs = np.log(np.maximum(probabilities.astype(np.float64), LEAST))
    spread = np.zeros(2 * len(labels) + 1, np.int64)
    spread[1::2] = labels
    # A blank between two labels may be skipped, unless they are equal.
    skips = np.zeros(len(spread), bool)
    skips[3::2] = labels[1:] != labels[:-1]
    forward = np.full(len(spread), -np.inf)
    forward[:2] = logs[0, spread[:2]]
    for step in logs[1:]:
        before = np.concatenate([[-np.inf], forward[:-1]])
        skipped = np.where(
            skips, np.concatenate([[-np.inf, -np.inf], forward])[: len(spread)], -np.inf
        )
        forward = np.logaddexp(np.logaddexp(forward, before), skipped) + step[spread]
    return -float(np.logaddexp.reduce(forward[-2:]))


def _sums(values: np.ndarray) -> np.ndarray:
    """The sum of each sample's values, shape (n,)."""
    return np.asarray(values.reshape(len(values), -1).sum(1))
