"""The mean of the classes, and which class is far below it, against scikit-learn and scipy."""

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.metrics import recall_score

from device_agent.formats.class_counts import (
    CHANCE,
    FAR,
    class_accuracies,
    mean_of_classes,
    worst_class,
)


@pytest.mark.parametrize("classes", [1, 2, 10, 200])
def test_the_mean_of_the_classes_is_scikit_learns_balanced_accuracy(classes: int) -> None:
    order = np.random.default_rng(classes)
    y, predicted = order.integers(classes, size=(2, 500))
    labels = np.bincount(y, minlength=classes + 1)  # the last class has no labels
    correct = np.bincount(y[y == predicted], minlength=classes + 1)
    counts = list(zip(labels.tolist(), correct.tolist(), strict=True))
    recall = recall_score(y, predicted, labels=np.unique(y), average="macro", zero_division=0)
    assert mean_of_classes(counts) == pytest.approx(recall)
    assert class_accuracies(counts)[-1] is None


def test_the_worst_class_is_more_than_chance() -> None:
    order = np.random.default_rng(0)
    said = 0
    for _ in range(200):
        labels = order.integers(0, 60, 8)
        correct = order.binomial(labels, order.uniform(0.3, 1, 8))
        counts = list(zip(labels.tolist(), correct.tolist(), strict=True))
        shares = correct[labels > 0] / labels[labels > 0]
        low = [
            (right / of, number)
            for number, (of, right) in enumerate(counts)
            if of
            and right / of < shares.mean() - FAR
            and binom.cdf(right, of, shares.mean()) < CHANCE / 8
        ]
        assert worst_class(counts) == (min(low)[1] if low else None)
        said += bool(low)
    assert 20 < said < 180


def test_no_class_is_the_worst_without_a_difference() -> None:
    assert worst_class([]) is None
    assert worst_class([(0, 0), (0, 0)]) is None
    assert worst_class([(0, 0), (7, 0)]) is None
    assert worst_class([(10**9, 10**9), (10**9, 10**9 - 1)]) is None
    assert worst_class([(10**9, 10**9), (10**9, 0)]) == 1
    assert mean_of_classes([(0, 0)]) is None
