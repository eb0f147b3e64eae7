"""Simulated clients judge the model that they receive, as devices do."""

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import nn
from torch.nn import functional

from bundles import CLASSES, tiny_cnn
from device_agent.data.local_data import LocalData
from device_agent.formats.evaluation_counts import EvaluationRequest, LocalEvaluation
from device_agent.formats.label_rule import IGNORED
from device_agent.training.batching import held_out
from edgetailor import TrainingConfig, split
from simulated_runs import TINY_FLEET, run_tiny_fleet
from toolkit.simulation.logged_figures import logged as logged_figures
from toolkit.simulation.results import RoundResult
from toolkit.simulation.simulate import simulate
from toolkit.simulation.torch_executor import TorchExecutor
from toolkit.submodels.global_model import from_model

CLIENTS, SHARE = 6, 0.25
FILE = f"""{TINY_FLEET}
[evaluation]
share = {SHARE}
by_class = true

[simulation]
data = "local.npz"
partition = "dirichlet"
alpha = 0.3
"""


def check_held_out(
    result: RoundResult, state: Mapping[str, torch.Tensor], data: tuple[np.ndarray, np.ndarray]
) -> None:
    """The round's figures on held-out data are those of scikit-learn with the round's model."""
    model, (x, y) = tiny_cnn(), data
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    with torch.no_grad():
        predicted = model.eval()(torch.from_numpy(x)).argmax(1).numpy()
    matrix = confusion_matrix(y, predicted, labels=range(CLASSES))
    assert result.held_out is not None
    assert result.held_out.classes == [
        *zip(matrix.sum(1).tolist(), matrix.diagonal().tolist(), strict=True)
    ]


def test_figures_are_those_of_pooled_samples(tmp_path: Path) -> None:
    """Round 1 judges the initial model, round 2 that of round 1."""
    results, received, prepared = run_tiny_fleet(tmp_path, FILE)
    for result, state in zip(results, received[:2], strict=True):
        model = tiny_cnn()
        model.load_state_dict({name: state[name] for name in model.state_dict()})
        right, total, losses, accuracies = 0, 0, 0.0, []
        for client in range(CLIENTS):
            data = prepared.client_data(client)
            rows = held_out(len(data), SHARE)
            labels = torch.from_numpy(data.y[rows])
            with torch.no_grad():
                output = model.eval()(torch.from_numpy(data.x[rows]))
            correct = int((output.argmax(dim=1) == labels).sum())
            losses += float(functional.cross_entropy(output.double(), labels, reduction="sum"))
            right, total = right + correct, total + len(rows)
            accuracies.append(correct / len(rows))
        check_held_out(result, received[result.round], prepared.held_out)
        came = result.devices
        assert came is not None
        assert (came.round, came.devices) == (result.round, CLIENTS)
        assert (came.correct, came.counted) == (right, total)
        assert came.loss == pytest.approx(losses / total, rel=1e-5)
        assert came.worst_accuracy == min(accuracies)
        assert {name: kind.devices for name, kind in came.kinds.items()} == {"phone": 4, "board": 2}
        assert came.classes is not None
        assert np.sum(came.classes, axis=0).tolist() == [total, right]
        assert logged_figures(result).figures["devices_accuracy"] == right / total
    # Read from the folder again, the results are the same.
    assert simulate(tmp_path / "fleet.toml", tmp_path / "out") == results


def judged(
    model: nn.Module, x: np.ndarray, y: np.ndarray, training: TrainingConfig
) -> LocalEvaluation:
    submodel = split(model, "full", x.shape[1:], training)
    executor = TorchExecutor(submodel)
    bundle = executor.bundle(from_model(model), 1.0, 1)
    asked = EvaluationRequest(share=0.5, by_class=True)
    update = executor.train(bundle, LocalData(x, y), 0, {}, 0.0, asked)
    assert isinstance(update.record.evaluation, LocalEvaluation)
    return update.record.evaluation


def test_classes_of_a_model_with_a_label_for_each_position() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 3, 1)))
    draw = np.random.default_rng(0)
    x = draw.standard_normal((20, 1, 4, 4), dtype=np.float32)
    y = draw.choice([0, 1, 2, IGNORED], size=(20, 4, 4))
    came = judged(model, x, y, TrainingConfig(batch_size=3)).before
    rows = held_out(20, 0.5)
    labels = torch.from_numpy(y[rows])
    with torch.no_grad():
        output = model(torch.from_numpy(x[rows]))
    right = output.argmax(dim=1) == labels
    expected = [(int((labels == c).sum()), int((right & (labels == c)).sum())) for c in range(3)]
    assert came.classes == tuple(expected)
    assert (came.samples, came.counted) == (10, int((labels != IGNORED).sum()))
    loss = functional.cross_entropy(output.double(), labels, reduction="sum")
    assert came.loss_sum == pytest.approx(float(loss), rel=1e-5)


def test_a_regression_sends_the_sum_of_its_squared_errors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(out=nn.Linear(4, 2)))
    draw = np.random.default_rng(0)
    x, y = (draw.standard_normal((20, size), dtype=np.float32) for size in (4, 2))
    came = judged(model, x, y, TrainingConfig(batch_size=3, loss="mse")).before
    rows = held_out(20, 0.5)
    with torch.no_grad():
        errors = model(torch.from_numpy(x[rows])).numpy() - y[rows]
    assert (came.correct, came.classes, came.counted) == (None, None, 10)
    assert came.loss_sum == pytest.approx(float((errors**2).mean(axis=1).sum()), rel=1e-5)
    assert came.absolute_sum == pytest.approx(float(np.abs(errors).mean(axis=1).sum()), rel=1e-5)
