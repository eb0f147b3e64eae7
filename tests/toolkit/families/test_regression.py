"""Regressions from the data to the global model: labels are numbers, and there is no accuracy."""

import copy
import json
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import oracles
from command_models import TINY
from commands import edgetailor
from device_agent.data.local_data import load_data
from device_agent.federation.fleet_status import lines
from device_agent.formats.atomic_files import write_folder
from device_agent.formats.bundle import open_bundle
from device_agent.formats.evaluation_counts import EvaluationRequest, LocalEvaluation
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.update import read_update
from device_agent.training.batching import held_out
from device_agent.training.random_run import synthetic
from edgetailor import Federation, TrainingConfig
from exporters.export import Format, export
from models_for_tests import CLASSES, INPUT_SHAPE
from oracles import Device, Plan
from parameters import some_long
from profiles.errors import DataError
from refusals import refused
from toolkit.coordinator.sample_files import read_samples
from toolkit.coordinator.server import Server
from toolkit.evaluation_sums import Evaluation
from trainings import evaluate_bundle, train_bundle
from vector_fleet import CONFIG, VectorModel, configured, enrol, running

PLAN = Plan(batch_size=8, epochs=2, rate=0.01, momentum=0.0, weight_decay=0.1)
PROXIMAL = 0.5
SAMPLES = 21
X = np.zeros((4, 2), np.float32)
Y = np.ones((4, 3), np.float32)


def federation(seed: int) -> Federation:
    training = TrainingConfig(
        batch_size=PLAN.batch_size,
        epochs=PLAN.epochs,
        learning_rate=PLAN.rate,
        weight_decay=PLAN.weight_decay,
        loss="mse",
        optimizer="adamw",
        proximal=PROXIMAL,
    )
    fleet = Federation("models_for_tests:smooth_cnn", INPUT_SHAPE, training, seed=seed)
    fleet.model.load_into(fleet.module)
    return fleet


def local_data(seed: int, folder: Path) -> tuple[Device, str]:
    draw = np.random.default_rng(seed)
    x = draw.normal(0.5, 2, (SAMPLES, *INPUT_SHAPE)).astype(np.float32)
    y = draw.standard_normal((SAMPLES, CLASSES)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=y)
    return Device(x, y, seed=5), str(folder / "data.npz")


def round_of(model: nn.Module, device: Device, dtype: torch.dtype = torch.float64) -> oracles.State:
    model = copy.deepcopy(model).to(dtype).train()
    first = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=PLAN.rate, weight_decay=PLAN.weight_decay)
    x = torch.from_numpy(device.x).to(dtype)
    for y, indices in device.visits(PLAN):
        away = sum((p - q).square().sum() for p, q in zip(model.parameters(), first, strict=True))
        oracles.descend(optimizer, mse_loss(model(x[indices]), y.to(dtype)) + PROXIMAL / 2 * away)
    return oracles.state_of(model)


def settled(model: nn.Module, device: Device) -> bool:
    """Whether rounding hardly matters: AdamW divides a gradient near 0 by its own size."""
    exact, rounded = round_of(model, device), round_of(model, device, torch.float32)
    return all((rounded[n] - v).norm() <= 1e-5 * v.norm() for n, v in exact.items())


def loss_of(model: nn.Module, device: Device) -> float:
    with torch.no_grad():
        output = copy.deepcopy(model).double().eval()(torch.from_numpy(device.x).double())
    return float(mse_loss(output, torch.from_numpy(device.y).double()))


def test_a_round_of_a_regression(seed: int, tmp_path: Path) -> None:
    fleet = federation(seed)
    for number in count(seed):
        device, data = local_data(number, tmp_path)
        if settled(fleet.module, device):
            break
    expected, before = round_of(fleet.module, device), loss_of(fleet.module, device)
    bundle = tmp_path / "bundle"
    write_folder(bundle, fleet.bundle("full"))
    judged = evaluate_bundle(bundle, data, threads=1)
    assert (judged.samples, judged.correct) == (SAMPLES, None)
    assert judged.loss == pytest.approx(before, rel=1e-5)
    assert synthetic(open_bundle(bundle), 5).y.shape == (5, CLASSES)

    train_bundle(bundle, data, tmp_path / "update", threads=1, seed=device.seed)
    fleet.fold([read_update(tmp_path / "update")])
    accuracy, loss = fleet.evaluate(device.x, device.y)
    came = oracles.state_of(fleet.module)
    assert accuracy is None
    assert loss == pytest.approx(loss_of(fleet.module, device), rel=1e-5)
    for name, value in expected.items():
        assert float((came[name] - value).norm()) <= 1e-4 * float(value.norm()), name
    with refused("data.wrong-shape", shape=[21, 2], expected=[CLASSES]):
        fleet.evaluate(device.x, device.y[:, :2])


@pytest.mark.parametrize("format", some_long(["onnx", "tflite"], "tflite"))
def test_devices_add_up_absolute_errors(tmp_path: Path, format: Format) -> None:
    fleet = federation(1)
    device, data = local_data(1, tmp_path)
    submodel = fleet.submodel("full")
    values = submodel.cut(fleet.model)
    export(submodel.program, values, tmp_path / "b", base="g", format=format, check=True)
    asked = EvaluationRequest(share=0.5)
    done = train_bundle(tmp_path / "b", data, tmp_path / "update", threads=1, evaluation=asked)
    assert isinstance(done.record.evaluation, LocalEvaluation)
    rows = held_out(SAMPLES, 0.5)
    with torch.no_grad():
        output = fleet.module.double().eval()(torch.from_numpy(device.x[rows]).double()).numpy()
    errors = np.abs(output - device.y[rows]).mean(1)
    assert done.record.evaluation.before.absolute_sum == pytest.approx(errors.sum(), rel=1e-4)


@pytest.mark.long
def test_a_slice_judges_on_its_recordings(seed: int, tmp_path: Path) -> None:
    """A classification. The last batch of the 21 samples is smaller and counts by its size."""
    fleet = Federation("models_for_tests:smooth_cnn", INPUT_SHAPE, TrainingConfig(8), seed=seed)
    device, _ = local_data(seed, tmp_path)
    y = np.random.default_rng(seed).integers(CLASSES, size=SAMPLES)
    np.savez(tmp_path / "classes.npz", x=device.x, y=y)
    bundle = tmp_path / "bundle"
    write_folder(bundle, fleet.bundle("slice:residual"))
    judged = evaluate_bundle(bundle, str(tmp_path / "classes.npz"), threads=1)
    with torch.no_grad():
        logits = fleet.module.eval()(torch.from_numpy(device.x))
    assert judged.correct == np.count_nonzero(logits.argmax(1).numpy() == y)
    assert judged.loss == pytest.approx(float(cross_entropy(logits, torch.from_numpy(y))), rel=1e-5)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y[:, :2], r"x must be \(n, 2\) and y \(n, 3\); they are \(4, 2\) and \(4, 2\)"),
        (Y[:, 0], r"y \(n, 3\); they are \(4, 2\) and \(4,\)"),
        (Y[:3], r"they are \(4, 2\) and \(3, 3\)"),
        (
            np.array([0, 1, 2, 0]),
            "x must be float32 and y float32; they are float32 and int64. Classes are int64; ",
        ),
        (Y * np.inf, "y contains a number that is not finite"),
    ],
)
def test_numbers_that_do_not_fit(tmp_path: Path, y: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "local.npz", x=X, y=y)
    with pytest.raises(DataError, match=message):
        load_data(str(tmp_path / "local.npz"), (2,), LabelRule(None, (3,), "float32"))


NUMBERS = LabelRule(None, None, "float32")


def test_held_out_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "held_out.npz", x=X, y=Y)
    np.testing.assert_array_equal(read_samples(tmp_path / "held_out.npz", (2,), NUMBERS)[1], Y)
    np.savez(tmp_path / "held_out.npz", x=X, y=Y[:3])
    with pytest.raises(DataError, match=r"y \(n, \.\.\.\); they are \(4, 2\) and \(3, 3\)"):
        read_samples(tmp_path / "held_out.npz", (2,), NUMBERS)


class Numbers(VectorModel):
    """A global model without an accuracy."""

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> Evaluation:
        return Evaluation(len(x), len(x), None, 0.25, rmse=0.5, mae=0.4)


def test_a_coordinator_without_an_accuracy(tmp_path: Path) -> None:
    config = configured(tmp_path, CONFIG.replace("[training]", '[training]\nloss = "mse"'))
    with pytest.raises(DataError, match="y float32; they are float32 and int64"):
        Server(config, Numbers(), Path("fleet.toml"))
    np.savez(config.held_out, x=X, y=Y)
    told: list[str] = []
    with running(config, Numbers(), told.append) as server:
        links = enrol(server, tmp_path)
        end = time.monotonic() + 10
        while not server.coordinator.status().history and time.monotonic() < end:
            time.sleep(0.02)
        status = next(iter(links.values())).status()
    assert lines(status)[0].endswith("global loss 0.2500, RMSE 0.5, MAE 0.4")
    assert "Round 0 of 3: loss 0.2500, RMSE 0.5, MAE 0.4, from 0 updates" in told
    history = json.loads((config.state / "history.json").read_text())["history"]
    assert history[0]["accuracy"] is None


def test_commands_of_a_regression(folder: Path) -> None:
    """`export --loss mse` and `evaluate --loss mse` on the same model and samples."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((5, 1, 6, 6), dtype=np.float32)
    y = draw.standard_normal((5, 8), dtype=np.float32)
    np.savez(folder / "data.npz", x=x, y=y)
    options = ("--loss", "mse", "--optimizer", "adam", "--momentum", "0", "--proximal", "0.1")
    done = edgetailor("export", *TINY, *options, "--out", "b", "--save-weights", "w", cwd=folder)
    assert done.code == 0, done.stderr
    judged = evaluate_bundle(folder / "b", str(folder / "data.npz"), threads=1)
    arguments = ("--weights", "w", "--data", "data.npz", "--loss", "mse")
    done = edgetailor("evaluate", TINY[0], *TINY[1:3], *arguments, cwd=folder)
    assert done.stdout.startswith(f"loss {judged.loss:.4f}, RMSE {judged.loss**0.5:.4g}, MAE ")
    done = edgetailor("evaluate", TINY[0], *TINY[1:3], *arguments, "--json", cwd=folder)
    assert json.loads(done.stdout)["accuracy"] is None
