"""Computes the accuracy of each class from the counts of labels and of correct predictions."""

import math
from collections.abc import Sequence

from profiles.text_formatting import counted

ClassCounts = Sequence[tuple[int, int]]
"""For each class, its number of labels and how many of them are predicted correctly."""
FAR = 0.1
"""An accuracy is far below the mean only if it is lower by more than this."""
CHANCE = 0.05
"""An accuracy is far below the mean only if chance explains it with less than this probability; see
`worst_class`."""
MANY = 1000
"""Above this number of labels, an accuracy that is FAR below the mean is never chance."""


def class_accuracies(counts: ClassCounts) -> list[float | None]:
    """The accuracy of each class; None for a class without labels."""
    return [correct / labels if labels else None for labels, correct in counts]


def mean_of_classes(counts: ClassCounts) -> float | None:
    """The mean accuracy of the classes that have labels (balanced accuracy).

    All classes have equal weight, even if they have different numbers of labels. Returns None if no
    class has labels.

    Examples:
        >>> mean_of_classes([(90, 90), (10, 5), (0, 0)])
        0.75
    """
    known = [accuracy for accuracy in class_accuracies(counts) if accuracy is not None]
    return math.fsum(known) / len(known) if known else None


def worst_class(counts: ClassCounts) -> int | None:
    """The class with the lowest accuracy, if this accuracy is far below the mean; else None.

    A class is far below the mean if two conditions hold. First, its accuracy is lower than the mean
    by more than FAR. Second, chance does not explain this difference. To test this, assume that
    each label of the class is predicted correctly with a probability equal to the mean accuracy.
    Under this assumption, the binomial probability of so few correct predictions must be below
    CHANCE divided by the number of classes.

    Examples:
        >>> worst_class([(100, 95), (100, 90), (100, 40)])
        2
        >>> worst_class([(100, 95), (100, 90), (1, 0)]) is None
        True
    """
    mean = mean_of_classes(counts)
    if mean is None:
        return None
    low = sorted(
        (correct / labels, number)
        for number, (labels, correct) in enumerate(counts)
        if labels and correct / labels < mean - FAR
    )
    return next(
        (
            number
            for _, number in low
            if _at_most(counts[number][1], counts[number][0], mean) < CHANCE / len(counts)
        ),
        None,
    )


def worst_class_text(counts: ClassCounts) -> str | None:
    """Name the class whose accuracy is far below the mean; None if there is none."""
    worst = worst_class(counts)
    if worst is None:
        return None
    labels, correct = counts[worst]
    return f"{worst}, far below the mean: {correct / labels:.1%} of {counted(labels, 'label')}"


def _at_most(correct: int, labels: int, probability: float) -> float:
    """The probability that at most `correct` of `labels` are predicted correctly."""
    if labels > MANY:
        return 0.0
    return math.fsum(
        math.comb(labels, right) * probability**right * (1 - probability) ** (labels - right)
        for right in range(correct + 1)
    )
