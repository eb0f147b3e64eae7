"""`edgetailor-agent predict`: the whole output, compared with plain PyTorch."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import bundles
import edgetailor as et
from bundles import BundleOf
from commands import Agent, refusal
from device_agent.formats.preprocessing import Images
from exporters.export import export
from own_losses import Boxes
from toolkit.splitting import split
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import TrainingConfig


def expected(x: np.ndarray) -> np.ndarray:
    model, _ = bundles.tiny_model()
    with torch.no_grad():
        return torch.softmax(model.eval()(torch.from_numpy(x)), 1).numpy()


def test_a_line_for_each_sample(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path, seed: int
) -> None:
    x, _ = bundles.samples(3, seed)
    np.save(tmp_path / "x.npy", x)
    done = agent("predict", bundle_of("full"), "--data", "x.npy")
    lines = [
        f"x.npy, sample {number}  {row.argmax()}      {row.max():.1%}"
        for number, row in enumerate(expected(x), 1)
    ]
    lines.insert(0, "file             class  probability")
    assert (done.code, done.stderr, done.stdout.splitlines()) == (0, "", lines)


def test_json_has_the_probabilities(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path, seed: int
) -> None:
    x, _ = bundles.samples(30, seed)
    np.savez(tmp_path / "x.npz", x=x)
    bundle = bundle_of("slice")
    done = agent("predict", bundle, "--data", "x.npz", "--json", "--max-memory", "400MB")
    document = json.loads(done.stdout)
    predictions = document.pop("predictions")
    assert document.pop("predicted_bytes") > 0
    assert document == {
        "version": 1,
        "bundle": str(bundle),
        "submodel": "slice:classifier",
        "personal": None,
        "classes": list(map(str, range(bundles.CLASSES))),
        "failed": [],
    }
    found = np.array([prediction["probabilities"] for prediction in predictions])
    np.testing.assert_allclose(found, expected(x), atol=1e-5)
    assert [p["class"] for p in predictions] == [str(row.argmax()) for row in expected(x)]


def test_a_ctc_model_prints_labels(agent: Agent, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    nn.init.eye_(model.weight)
    # The graphs of test_predictor.py, which are in the cache then: lowering them takes seconds.
    submodel = split(model, "full", (7, 4), TrainingConfig(batch_size=4, loss="ctc"))
    values = submodel.cut(from_model(model))
    export(submodel.program, values, tmp_path / "b", base="0" * 64, check=False)
    np.save(tmp_path / "x.npy", 9 * np.eye(4, dtype=np.float32)[[2, 2, 0, 2, 3, 0, 0]][None])
    assert agent("predict", "b", "--data", "x.npy").stdout == "file   labels\nx.npy  2 2 3\n"
    [found] = json.loads(agent("predict", "b", "--data", "x.npy", "--json").stdout)["predictions"]
    assert found["labels"] == ["2", "2", "3"]
    assert np.shape(found["probabilities"]) == (7, 4)


def test_a_device_predicts_with_what_it_received(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path, seed: int
) -> None:
    x, _ = bundles.samples(1, seed)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "state").mkdir()
    identity = {"url": "http://127.0.0.1:1", "device": "d", "secret": "s", "name": "n"}
    identity |= {"submodel": "cp:2.0"}
    (tmp_path / "state" / "device.json").write_text(json.dumps(identity))
    arguments = ("predict", "--data", "x.npy", "--state", "state")
    assert "has not received a model yet" in refusal(agent(*arguments))
    shutil.copytree(bundle_of("cp"), tmp_path / "state" / "bundle")
    assert agent(*arguments).stdout.splitlines()[1].startswith("x.npy  ")
    state = refusal(agent("predict", "state", "--data", "x.npy"))
    assert "predict --state state --data FILE" in state
    assert "has no personal model" in refusal(agent(*arguments, "--personal"))
    data = bundles.write_data(tmp_path / "data.npz", seed=seed)
    own = tmp_path / "state" / "personal.safetensors"
    assert (
        agent("train", bundle_of("cp"), "--data", data, "--out", "u", "--personal", own).code == 0
    )
    found = json.loads(agent(*arguments, "--personal", "--json").stdout)
    assert found["personal"] == str(Path("state") / "personal.safetensors")
    assert found["predictions"] != json.loads(agent(*arguments, "--json").stdout)["predictions"]


def test_standard_input(bundle_of: BundleOf, tmp_path: Path, seed: int) -> None:
    x, _ = bundles.samples(1, seed)
    content = io.BytesIO()
    np.save(content, x)
    done = subprocess.run(
        [sys.executable, "-m", "device_agent.cli", "predict", bundle_of("full"), "--data", "-"],
        input=content.getvalue(),
        capture_output=True,
        check=True,
    )
    [row] = expected(x)
    assert done.stdout.decode().splitlines() == [
        "file       class  probability",
        f"stdin.npy  {row.argmax()}      {row.max():.1%}",
    ]


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04", b"GIF89a"])
def test_what_is_no_array_is_refused(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    assert "x.npy" in refusal(agent("predict", bundle_of("full"), "--data", "x.npy"))


def test_damaged_pictures_do_not_stop_a_folder(agent: Agent, tmp_path: Path) -> None:
    """They are named, the others are predicted, and the exit code says that some are missing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    names = ("ash", "birch", "cedar")
    et.deploy(model, "full", (1, 3, 3), tmp_path / "b", preprocessing=Images(classes=names))
    (tmp_path / "seen").mkdir()
    grey = np.arange(9, dtype=np.uint8).reshape(3, 3) * 20
    for name in ("a.png", "d.png"):
        Image.fromarray(grey).save(tmp_path / "seen" / name)
    (tmp_path / "seen" / "b.png").write_bytes(b"")
    (tmp_path / "seen" / "c.png").write_bytes((tmp_path / "seen" / "a.png").read_bytes()[:45])
    with torch.no_grad():
        row = torch.softmax(model(torch.from_numpy(grey[None, None] / np.float32(255))), 1)[0]
    best = int(row.argmax())
    done = agent("predict", "b", "--data", "seen")
    assert done.code == 2
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["file", "class", "probability"],
        *([file, names[best], f"{float(row[best]):.1%}"] for file in ("a.png", "d.png")),
    ]
    errors = done.stderr.splitlines()
    assert [line.split()[1] for line in errors[:2]] == ["seen/b.png", "seen/c.png"]
    assert errors[2:] == ["2 files could not be used."]
    document = json.loads(agent("predict", "b", "--data", "seen", "--json").stdout)
    assert [p["file"] for p in document["predictions"]] == ["a.png", "d.png"]
    assert [(f["code"], f["path"]) for f in document["failed"]] == [
        ("data.unreadable-file", f"seen/{name}.png") for name in "bc"
    ]
    # A single picture is an ordinary error; so is a folder given in place of one of its bundles.
    assert "seen/b.png is not a picture" in refusal(agent("predict", "b", "--data", "seen/b.png"))
    assert "It has the bundles b: give one of them, such as b." in refusal(
        agent("predict", ".", "--data", "seen")
    )


def test_a_file_without_samples(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    np.savez(tmp_path / "z.npz", y=np.zeros(3), more=np.zeros(2))
    said = refusal(agent("predict", bundle_of("full"), "--data", "z.npz"))
    assert said.endswith("has no array 'x', only y, more. It must contain x (samples).")
    np.save(tmp_path / "x.npy", np.zeros(3))
    said = refusal(agent("train", bundle_of("full"), "--data", "x.npy", "--out", "u"))
    assert "x.npy is a single array, but samples need labels" in said


def test_one_trained_output_of_several(agent: Agent, tmp_path: Path) -> None:
    """The largest of all numbers names no class: the box's are larger than the class's."""
    model = Boxes()
    with torch.no_grad():
        model.box.bias.add_(100)
    submodel = split(model, "full", (6,), TrainingConfig(loss="kind=cross-entropy"))
    et.export(submodel, from_model(model), tmp_path / "b", verify=False)
    predictor = et.Predictor(tmp_path / "b")
    assert (predictor.meaning, predictor.classes) == ("outputs", ())
    np.save(tmp_path / "x.npy", np.zeros((2, 6), np.float32))
    titles, row, _ = agent("predict", "b", "--data", "x.npy").stdout.splitlines()
    assert titles.split() == ["file", "numbers"]
    assert "kind: " in row
    assert "box: 1" in row
