"""Counts of devices add up to the figures that NumPy computes from all labels."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from sklearn.metrics import mean_absolute_error, root_mean_squared_error

from device_agent.formats.evaluation_counts import LARGEST_LOSS, EvaluationCounts, check_counts
from refusals import refused
from toolkit.coordinator.rounds.device_evaluation import DeviceCounts, federated_evaluation

CLASSES = 3
LABELS = st.lists(
    st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1), st.floats(0, 100)),
    min_size=1,
    max_size=20,
)
"""Label, prediction and loss of each sample of a device."""
DEVICES = st.lists(st.tuples(st.sampled_from(["desk", "board"]), LABELS), min_size=1, max_size=25)


def counted(labels: list[tuple[int, int, float]], by_class: bool = True) -> EvaluationCounts:
    classes = tuple(
        (sum(y == c for y, _, _ in labels), sum(y == p == c for y, p, _ in labels))
        for c in range(CLASSES)
    )
    return EvaluationCounts(
        samples=len(labels),
        counted=len(labels),
        correct=sum(y == p for y, p, _ in labels),
        loss_sum=sum(loss for _, _, loss in labels),
        classes=classes if by_class else None,
    )


@given(DEVICES, st.randoms())
def test_figures_are_those_of_all_labels(
    devices: list[tuple[str, list[tuple[int, int, float]]]], order: Random
) -> None:
    given_counts = [DeviceCounts(kind, counted(own), counted(own[::-1])) for kind, own in devices]
    figure = federated_evaluation(5, given_counts)
    assert figure is not None
    everything = [sample for _, own in devices for sample in own]
    y, predicted, losses = (np.array(column) for column in zip(*everything, strict=True))
    assert (figure.round, figure.devices, figure.samples) == (5, len(devices), len(everything))
    assert figure.correct == np.count_nonzero(y == predicted)
    assert figure.accuracy == np.count_nonzero(y == predicted) / len(y)
    assert figure.loss == pytest.approx(losses.mean(), rel=1e-12, abs=1e-12)
    assert figure.trained_accuracy == figure.accuracy
    shares = sorted(np.mean([y == p for y, p, _ in own]) for _, own in devices)
    means = sorted(np.mean([loss for _, _, loss in own]) for _, own in devices)
    tenth = -(-len(devices) // 10)
    assert figure.mean_accuracy == pytest.approx(np.mean(shares), rel=1e-12, abs=1e-12)
    assert figure.worst_accuracy == pytest.approx(np.mean(shares[:tenth]), rel=1e-12, abs=1e-12)
    assert figure.mean_loss == pytest.approx(np.mean(means), rel=1e-12, abs=1e-12)
    assert figure.worst_loss == pytest.approx(np.mean(means[-tenth:]), rel=1e-12, abs=1e-12)
    right = y == predicted
    assert figure.classes == [
        (np.count_nonzero(y == c), np.count_nonzero(right & (y == c))) for c in range(CLASSES)
    ]
    assert sum(kind.correct or 0 for kind in figure.kinds.values()) == figure.correct
    assert sum(kind.devices for kind in figure.kinds.values()) == figure.devices
    shuffled = list(given_counts)
    order.shuffle(shuffled)
    assert federated_evaluation(5, shuffled) == figure


def test_a_regression_has_losses_only() -> None:
    def device(of: int, loss: float) -> DeviceCounts:
        return DeviceCounts("board", EvaluationCounts(samples=of, counted=of, loss_sum=loss))

    figure = federated_evaluation(1, [device(10, 20.0), device(30, 0.0)])
    assert figure is not None
    assert (figure.accuracy, figure.correct, figure.mean_accuracy) == (None, None, None)
    assert (figure.loss, figure.mean_loss, figure.worst_loss) == (0.5, 1.0, 2.0)
    assert figure.trained_loss is None


def test_the_errors_of_a_regression_are_those_of_all_numbers() -> None:
    order = np.random.default_rng(0)
    errors = [order.normal(size=(int(order.integers(1, 30)), 3)) for _ in range(12)]
    given_counts = [
        EvaluationCounts(
            samples=len(own),
            counted=len(own),
            loss_sum=float((own**2).mean(1).sum()),
            absolute_sum=float(np.abs(own).mean(1).sum()),
        )
        for own in errors
    ]
    devices = [
        DeviceCounts("board" if number % 3 else "desk", own)
        for number, own in enumerate(given_counts)
    ]
    figure = federated_evaluation(1, devices)
    assert figure is not None
    zeros = [np.zeros(own.shape) for own in errors]
    rows = {"board": [n for n in range(12) if n % 3], "desk": [0, 3, 6, 9], None: range(12)}
    for kind, members in rows.items():
        own = figure if kind is None else figure.kinds[kind]
        pooled = np.concatenate([errors[n] for n in members]).ravel()
        expected = np.concatenate([zeros[n] for n in members]).ravel()
        assert own.rmse == pytest.approx(root_mean_squared_error(expected, pooled), rel=1e-12)
        assert own.mae == pytest.approx(mean_absolute_error(expected, pooled), rel=1e-12)
    # An agent that does not count absolute errors leaves both unknown.
    silent = DeviceCounts("board", EvaluationCounts(samples=1, counted=1, loss_sum=1.0))
    partly = federated_evaluation(1, [*devices, silent])
    assert partly is not None
    assert (partly.rmse, partly.kinds["board"].mae) == (None, None)
    assert partly.kinds["desk"].mae is not None


def test_devices_without_labels_are_left_out() -> None:
    nothing = DeviceCounts("board", EvaluationCounts(samples=2, counted=0, correct=0, loss_sum=0.0))
    assert federated_evaluation(1, []) is None
    assert federated_evaluation(1, [nothing]) is None
    some = DeviceCounts("board", counted([(0, 0, 1.0), (1, 0, 1.0)], by_class=False))
    figure = federated_evaluation(1, [nothing, some])
    assert figure is not None
    assert (figure.devices, figure.classes, figure.reporting_classes) == (1, None, 0)


def test_the_largest_losses_that_are_taken_can_be_added_up() -> None:
    huge = EvaluationCounts(samples=10, counted=10, correct=5, loss_sum=10 * LARGEST_LOSS)
    check_counts(huge, "board-1")
    figure = federated_evaluation(1, [DeviceCounts("board", huge, huge)] * 10_000)
    assert figure is not None
    assert figure.loss == pytest.approx(LARGEST_LOSS)
    with refused("update.unusable-evaluation"):
        check_counts(replace(huge, loss_sum=1e308), "board-1")
