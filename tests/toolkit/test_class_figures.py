"""By class and by error: what `evaluate` counts, against scikit-learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    mean_absolute_error,
    root_mean_squared_error,
)
from torch import nn
from torch.nn import functional

from device_agent.formats.label_rule import IGNORED
from exporters.objectives.objective import objective
from toolkit.evaluation_sums import EvaluationSums
from toolkit.model_evaluation import evaluate, evaluate_outputs


def logits(y: np.ndarray, classes: int, seed: int = 0) -> np.ndarray:
    """Logits that predict about half of the labels `y`, with the class axis last."""
    order = np.random.default_rng(seed)
    x = order.standard_normal((*y.shape, classes)).astype(np.float32)
    np.put_along_axis(x, np.maximum(y, 0)[..., None], 1.5, axis=-1)
    return x


@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        (10, range(10)),
        (10, [3]),  # one class only
        (10, [0, 1, 2, 3, 5, 6, 7, 8]),  # two classes without samples
        (2, range(2)),
        (1000, range(1000)),
    ],
)
def test_a_classification(classes: int, labels: list[int]) -> None:
    y = np.random.default_rng(1).choice(labels, 700)
    x = logits(y, classes)
    found = evaluate(nn.Identity(), x, y)
    predicted = x.argmax(-1)
    expected = confusion_matrix(y, predicted, labels=range(classes))
    assert found.confusion is not None
    np.testing.assert_array_equal(found.confusion, expected)
    assert found.accuracy == accuracy_score(y, predicted)
    assert found.classes == tuple(
        zip(np.bincount(y, minlength=classes), expected.diagonal(), strict=True)
    )
    assert found.rmse is None
    assert found.mae is None


@pytest.mark.parametrize("count", [1, 40, 700])
def test_groups_of_samples_have_the_losses_of_their_labels(count: int, seed: int) -> None:
    order = np.random.default_rng(seed)
    y = order.integers(3, size=(count, 2))
    x = logits(y, 3)
    y[order.random(y.shape) < 0.3] = IGNORED
    y[:, 0][y[:, 1] == IGNORED] = 1  # each sample has a label
    groups = evaluate(nn.Identity(), x, y).groups
    assert groups is not None
    assert min(count, 90) <= len(groups) <= 110
    assert groups[:, 1].sum() == (y != IGNORED).sum()
    losses = functional.cross_entropy(
        torch.from_numpy(x).double().flatten(0, 1),
        torch.from_numpy(y).flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    by_label = [losses[: 2 * end].sum().item() for end in _ends(groups, y)]
    np.testing.assert_allclose(groups[:, 0].cumsum(), by_label, rtol=1e-6, atol=1e-9)


def _ends(groups: np.ndarray, y: np.ndarray) -> list[int]:
    """After how many samples each group ends, found by its number of labels."""
    labels = (y != IGNORED).sum(1).cumsum()
    return [int(np.searchsorted(labels, end)) + 1 for end in groups[:, 1].cumsum()]


def test_a_loss_that_takes_no_single_sample_has_no_losses_of_groups() -> None:
    def spread(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(output) < 2:
            raise ValueError
        return output.std()

    sums = EvaluationSums(replace(objective("cross-entropy", (3,)), loss=spread), 9)
    sums.add(torch.zeros(9, 3), np.zeros(9, np.int64))
    assert sums.evaluation(9, 9, 9.0).groups is None


def test_positions_with_classes_count_unless_they_are_ignored() -> None:
    order = np.random.default_rng(2)
    y = order.integers(4, size=(300, 6))
    x = logits(y, 4)
    y[order.random(y.shape) < 0.3] = IGNORED
    counts = y != IGNORED
    expected = confusion_matrix(y[counts], x.argmax(-1)[counts])
    found = evaluate(nn.Identity(), x, y)
    assert found.confusion is not None
    np.testing.assert_array_equal(found.confusion, expected)
    points = evaluate(nn.Identity(), np.moveaxis(x, 2, 1)[..., None], y[..., None])
    assert points.confusion is not None
    np.testing.assert_array_equal(points.confusion, expected)


def test_a_single_output_has_two_classes() -> None:
    order = np.random.default_rng(3)
    x = order.standard_normal((400, 1)).astype(np.float32)
    y = (x[:, 0] + order.standard_normal(400) > 0).astype(np.int64)
    found = evaluate(nn.Identity(), x, y)
    assert found.confusion is not None
    np.testing.assert_array_equal(found.confusion, confusion_matrix(y, x[:, 0] > 0))


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 4)])
def test_a_regression(shape: tuple[int, ...]) -> None:
    order = np.random.default_rng(4)
    x = order.standard_normal((600, *shape)).astype(np.float32)
    y = x + order.standard_normal(x.shape).astype(np.float32)
    found = evaluate(nn.Identity(), x, y, loss="mse")
    flat, expected = x.reshape(600, -1).astype(float), y.reshape(600, -1).astype(float)
    assert found.mae == pytest.approx(mean_absolute_error(expected, flat), rel=1e-12)
    # scikit-learn's mean over the outputs is of roots, so all numbers are one output here.
    rmse = root_mean_squared_error(expected.ravel(), flat.ravel())
    assert found.rmse == pytest.approx(rmse, rel=1e-12)
    assert (found.accuracy, found.classes, found.confusion) == (None, None, None)


def test_label_sequences_have_a_loss_only() -> None:
    x = np.random.default_rng(5).standard_normal((8, 6, 4)).astype(np.float32)
    y = np.full((8, 6), IGNORED)
    y[:, :2] = [1, 3]
    found = evaluate(nn.Identity(), x, y, loss="ctc")
    assert (found.accuracy, found.classes, found.rmse, found.mae) == (None,) * 4


def test_more_than_1000_classes_are_not_counted_one_by_one() -> None:
    y = np.random.default_rng(6).integers(1001, size=300)
    x = logits(y, 1001)
    found = evaluate(nn.Identity(), x, y)
    assert found.accuracy == accuracy_score(y, x.argmax(-1))
    assert (found.classes, found.confusion) == (None, None)


def test_outputs_that_are_no_numbers_predict_no_class() -> None:
    y = np.array([0, 1, 1])
    x = np.array([[9, 0], [0, 9], [np.nan, 9]], np.float32)
    found = evaluate_outputs(lambda given: torch.clone(given), x, y)
    assert found.classes == ((1, 1), (2, 1))
    assert found.confusion is not None
    assert found.confusion.tolist() == [[1, 0], [0, 1]]
