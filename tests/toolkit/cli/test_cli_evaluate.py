"""`edgetailor evaluate` on logits that are known by hand."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from command_models import DIGITS
from commands import edgetailor, refused, stages
from deployed_digits import FILE, HELD_OUT, JUDGED, federation, split_digits
from edgetailor import GlobalModel, load_model
from toolkit.coordinator.storage.saved_rounds import model_file
from toolkit.submodels.global_model import from_model

SIGNS = """
import torch
from torch import nn


class Sign(nn.Module):
    # (N, 1, 1, 2) -> (N, 2): the logits are the numbers themselves.
    def forward(self, x):
        return x.flatten(1)


def signs():
    return Sign()


class Total(nn.Module):
    def forward(self, x):
        return x.sum(0)
"""


@pytest.fixture
def signs(tmp_path: Path) -> Path:
    """A folder with a model whose logits are its inputs, its weights `w` and four samples."""
    (tmp_path / "signs.py").write_text(SIGNS)
    (tmp_path / "w").write_bytes(GlobalModel({}).save())
    x = np.log(np.array([[3, 1], [3, 1], [1, 3], [1, 1.5]], np.float32))
    np.savez(tmp_path / "held.npz", x=x.reshape(4, 1, 1, 2), y=np.array([0, 0, 0, 1]))
    return tmp_path


EVALUATE = ("evaluate", "signs:signs", "--weights", "w", "--input-shape", "1,1,2", "--data")
LOSS = -np.mean(np.log([0.75, 0.75, 0.25, 0.6]))
"""By hand: the logits are logarithms of odds."""
TABLE = f"""\
accuracy 75.0%, loss {LOSS:.4f} on 4 samples

class  labels  accuracy  0  1
0           3     66.7%  2  1
1           1    100.0%  .  1
.: 0; rows are the true classes, columns 0, 1, ... the predicted ones
mean of the classes: 83.3%
"""


def test_evaluate(signs: Path) -> None:
    done = edgetailor(*EVALUATE, "held.npz", cwd=signs)
    assert (done.code, done.stdout) == (0, TABLE)
    assert stages(done) == [
        *("loading PyTorch", "loading the model", "reading the data", "evaluating 4 samples")
    ]


def test_evaluate_as_json_and_on_a_single_sample(signs: Path) -> None:
    done = edgetailor(*EVALUATE, "held.npz", "--json", cwd=signs).succeeded()
    assert json.loads(done.stdout) == {
        "version": 1, "document": "evaluation", "model": "signs:signs", "weights": "w",
        "round": None, "devices": None, "samples": 4, "counted": 4, "accuracy": 0.75,
        "loss": pytest.approx(LOSS, rel=1e-6), "rmse": None, "mae": None, "metrics": None,
        "mean_class_accuracy": pytest.approx(5 / 6), "worst_class": None,
        "classes": [
            {"name": None, "labels": 3, "correct": 2, "accuracy": pytest.approx(2 / 3)},
            {"name": None, "labels": 1, "correct": 1, "accuracy": 1.0},
        ],
        "confusion": [[2, 1], [0, 1]],
        "judged_by_devices": False,
    }  # fmt: skip
    np.savez(signs / "held.npz", x=np.zeros((1, 1, 1, 2), np.float32), y=np.array([0]))
    done = edgetailor(*EVALUATE, "held.npz", cwd=signs).succeeded()
    assert done.stdout.startswith("accuracy 100.0%, loss 0.6931 on 1 sample\n")
    assert done.stdout.endswith("mean of the classes: 100.0%\n1 class without labels\n")


def test_a_regression_has_its_errors(signs: Path) -> None:
    x = np.array([[1, 2], [3, 5]], np.float32)
    np.savez(signs / "held.npz", x=x.reshape(2, 1, 1, 2), y=np.array([[1, 2], [0, 1]], np.float32))
    done = edgetailor(*EVALUATE, "held.npz", "--loss", "mse", cwd=signs)
    assert done.stdout == "loss 6.2500, RMSE 2.5, MAE 1.75 on 2 samples\n"


def test_the_model_of_a_federation(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = federation(tmp_path_factory)
    found = json.loads(edgetailor("evaluate", FILE, "--json", cwd=folder).stdout)
    _, (x, y) = split_digits()
    model = load_model(DIGITS[0], model_file(folder / "state", 1)).eval()
    predicted = model(torch.from_numpy(x)).argmax(1).numpy()
    assert (found["round"], found["samples"]) == (1, HELD_OUT)  # the best round
    assert found["confusion"] == confusion_matrix(y, predicted).tolist()
    assert found["devices"]["accuracy"] == JUDGED.accuracy
    first = json.loads(edgetailor("evaluate", FILE, "--round", 2, "--json", cwd=folder).stdout)
    assert first["accuracy"] < 0.5 < found["accuracy"]
    assert first["devices"] is None


def test_a_federation_without_samples(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(federation(tmp_path_factory), folder)
    config = (folder / FILE).read_text().replace('held_out = "held_out.npz"', "")
    (folder / "other.toml").write_text(config)
    found = json.loads(edgetailor("evaluate", "other.toml", "--json", cwd=folder).stdout)
    assert (found["round"], found["samples"], found["loss"]) == (1, 96, 0.2)
    assert found["judged_by_devices"]
    done = edgetailor("evaluate", "other.toml", cwd=folder)
    assert done.stdout == "accuracy 93.8%, loss 0.2000 on 96 samples\n"
    second = refused(folder, "evaluate", "other.toml", "--round", "2")
    assert "has no `held_out` samples, and its devices do not judge the model" in second
    said = refused(folder, "evaluate", "other.toml", "--weights", "w")
    assert said == "A federation's file has the model: leave out --weights."


def test_many_samples_are_judged_in_pieces(signs: Path) -> None:
    order = np.random.default_rng(0)
    x = order.standard_normal((1000, 1, 1, 2), dtype=np.float32)
    np.savez(signs / "held.npz", x=x, y=order.integers(2, size=1000))
    done = edgetailor(*EVALUATE, "held.npz", "--json", cwd=signs)
    with np.load(signs / "held.npz") as file:
        wide, y = file["x"].reshape(1000, 2).astype(np.float64), file["y"]
    losses = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(1000), y]
    found = json.loads(done.stdout)
    assert found["samples"] == 1000
    assert found["accuracy"] == np.mean(wide.argmax(axis=1) == y)
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"y": np.array([0, 1, 2, 0])},
            r"^held\.npz: the label 2 is outside the model's classes 0 ",
        ),
        ({"x": np.zeros((4, 2), np.float32)}, r"^held\.npz: x must be \(n, 1, 1, 2\)"),
        (
            {"x": np.zeros((0, 1, 1, 2), np.float32), "y": np.zeros(0, np.int64)},
            r"^held\.npz contains 0 samples\. Give at least 1\.",
        ),
    ],
)
def test_data_that_cannot_be_judged(
    signs: Path, change: dict[str, np.ndarray], message: str
) -> None:
    with np.load(signs / "held.npz") as file:
        arrays = {**file, **change}
    np.savez(signs / "held.npz", **arrays)
    assert re.search(message, refused(signs, *EVALUATE, "held.npz"))


def test_models_that_cannot_be_judged(signs: Path) -> None:
    (signs / "digits").write_bytes(from_model(load_model(DIGITS[0])).save())
    shape = ("--input-shape", "3,8,8", "--data", "held.npz")
    assert refused(signs, "evaluate", DIGITS[0], "--weights", "digits", *shape).startswith(
        "Wrong input shape (3, 8, 8): the layer 'units.0.conv' "
    )
    assert refused(signs, "evaluate", "signs:Total", "--weights", "w", *shape) == (
        "The model must return one tensor with the batch as its first axis."
    )
    missing = "A MODEL needs --weights, --input-shape or --input, and --data."
    assert refused(signs, "evaluate", "signs:signs", *shape) == missing
