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
from torch import nn

import bundles
from bundles import BundleOf
from commands import Agent, refusal
from exporters.export import export
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
        f"x.npy, sample {number}  {row.argmax()}  {row.max():.1%}"
        for number, row in enumerate(expected(x), 1)
    ]
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
    }
    found = np.array([prediction["probabilities"] for prediction in predictions])
    np.testing.assert_allclose(found, expected(x), atol=1e-5)
    assert [p["class"] for p in predictions] == [str(row.argmax()) for row in expected(x)]


def test_a_ctc_model_prints_labels(agent: Agent, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    nn.init.eye_(model.weight)
    submodel = split(model, "full", (5, 4), TrainingConfig(batch_size=4, loss="ctc"))
    values = submodel.cut(from_model(model))
    export(submodel.program, values, tmp_path / "b", base="0" * 64, check=False)
    np.save(tmp_path / "x.npy", 9 * np.eye(4, dtype=np.float32)[[2, 2, 0, 2, 3]][None])
    assert agent("predict", "b", "--data", "x.npy").stdout == "x.npy  2 2 3\n"
    [found] = json.loads(agent("predict", "b", "--data", "x.npy", "--json").stdout)["predictions"]
    assert found["labels"] == ["2", "2", "3"]
    assert np.shape(found["probabilities"]) == (5, 4)


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
    assert agent(*arguments).stdout.startswith("x.npy  ")
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
    assert done.stdout.decode() == f"stdin.npy  {row.argmax()}  {row.max():.1%}\n"


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04", b"GIF89a"])
def test_what_is_no_array_is_refused(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    assert "x.npy" in refusal(agent("predict", bundle_of("full"), "--data", "x.npy"))
