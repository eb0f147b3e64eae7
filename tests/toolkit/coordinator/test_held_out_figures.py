"""The figures on held-out data that a round keeps: of each class, or a regression's errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, mean_absolute_error, root_mean_squared_error
from torch import nn

from commands import edgetailor
from device_agent.federation.fleet_status import lines
from log_messages import logged
from models_for_tests import CLASSES, INPUT_SHAPE
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.closing.round_worker import RoundWorker
from toolkit.coordinator.coordinator import restore
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.saved_rounds import saved_rounds
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.model_loading import load_model

MODEL = "models_for_tests:smooth_cnn"
CONFIG = f"""
model = "{MODEL}"
input_shape = {list(INPUT_SHAPE)}
rounds = 1
held_out = "held_out.npz"

[training]
loss = "{{}}"

[[devices]]
name = "board"
submodel = "full"
"""
SAMPLES = 300


def begun(folder: Path, loss: str, x: np.ndarray, y: np.ndarray) -> list[str]:
    """Keep the initial model of a federation in `folder`; returns its status in lines."""
    (folder / "federation.toml").write_text(CONFIG.format(loss))
    config = load_config(folder / "federation.toml")
    store = Store(config.state)
    coordinator = restore(config, store, lambda: 0.0)
    federation = Federation(MODEL, INPUT_SHAPE, TrainingConfig(loss=loss))
    RoundWorker(coordinator, federation, (x, y), lambda: None).resume()
    status = lines(coordinator.status())
    store.close()
    return status


def output(x: np.ndarray) -> np.ndarray:
    """What PyTorch predicts with the initial model."""
    model: nn.Module = load_model(MODEL)
    with torch.no_grad():
        return np.asarray(model.eval()(torch.from_numpy(x)))


def test_each_class_of_a_classification(tmp_path: Path) -> None:
    order = np.random.default_rng(0)
    x = order.standard_normal((SAMPLES, *INPUT_SHAPE)).astype(np.float32)
    predicted = output(x).argmax(1)
    y = predicted.copy()
    frequent = int(np.bincount(y).argmax())
    bad = (frequent + 1) % CLASSES
    y[(predicted == frequent) & (order.random(SAMPLES) < 0.5)] = bad
    status = begun(tmp_path, "cross-entropy", x, y)
    matrix = confusion_matrix(y, predicted, labels=range(CLASSES))
    expected = [*zip(matrix.sum(1).tolist(), matrix.diagonal().tolist(), strict=True)]
    [saved] = saved_rounds(tmp_path / "state")
    assert saved.held_out is not None
    assert saved.held_out.classes == expected
    assert (saved.held_out.rmse, saved.held_out.mae) == (None, None)
    [entry] = json.loads((tmp_path / "state/history.json").read_text())["history"]
    errors = dict.fromkeys(("rmse", "mae", "metrics"))
    assert entry["held_out"] == {"classes": [*map(list, expected)], **errors}
    labels, correct = expected[bad]
    assert (
        f"  worst class on held-out data: {bad}, far below the mean: {correct / labels:.1%} of "
        f"{labels} labels" in status
    )
    shown = edgetailor("rounds", "state", cwd=tmp_path).stdout.splitlines()
    assert shown[-1].startswith(f"worst class after round 0 (held-out): {bad}, far below")


def test_the_errors_of_a_regression(tmp_path: Path) -> None:
    order = np.random.default_rng(0)
    x = order.standard_normal((SAMPLES, *INPUT_SHAPE)).astype(np.float32)
    y = order.standard_normal((SAMPLES, CLASSES)).astype(np.float32)
    status = begun(tmp_path, "mse", x, y)
    predicted = output(x)
    [saved] = saved_rounds(tmp_path / "state")
    assert saved.held_out is not None
    assert saved.held_out.rmse == pytest.approx(
        root_mean_squared_error(y.ravel(), predicted.ravel()), rel=1e-5
    )
    assert saved.held_out.mae == pytest.approx(mean_absolute_error(y, predicted), rel=1e-5)
    assert saved.held_out.classes is None
    assert f"RMSE {saved.held_out.rmse:.4g}, MAE {saved.held_out.mae:.4g}" in status[0]
    listed = edgetailor("rounds", "state", cwd=tmp_path).stdout.splitlines()
    assert listed[0].split() == ["round", "RMSE", "MAE", "updates", "model", "note"]
    errors = [f"{saved.held_out.rmse:.4g}", f"{saved.held_out.mae:.4g}"]
    assert listed[1].split()[:3] == ["0", *errors]
    shown = edgetailor("rounds", "state", "--round", "0", cwd=tmp_path).stdout
    assert "RMSE {}, MAE {}".format(*errors) in shown


def test_the_metrics_of_a_loss(tmp_path: Path) -> None:
    """Huber's loss measures the absolute error, as a loss of the user's own its metrics."""
    order = np.random.default_rng(0)
    x = order.standard_normal((SAMPLES, *INPUT_SHAPE)).astype(np.float32)
    y = order.standard_normal((SAMPLES, CLASSES)).astype(np.float32)
    with logged("toolkit") as messages:
        status = begun(tmp_path, "huber", x, y)
    mae = f"{mean_absolute_error(y, output(x)):.4g}"
    assert f", mae {mae}" in status[0]
    assert f", mae {mae}, from 0 updates" in messages[-1]
    listed = edgetailor("rounds", "state", cwd=tmp_path).stdout.splitlines()
    assert listed[0].split() == ["round", "loss", "mae", "updates", "model", "note"]
    assert listed[1].split()[2] == mae
    shown = edgetailor("rounds", "state", "--round", "0", cwd=tmp_path).stdout
    assert f", mae {mae}" in shown
