"""The programs in `examples/` run as they are."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from device_agent.formats.preprocessing import Images
from edgetailor import deploy, load_model
from toolkit.submodels.hyperparameters import TrainingConfig

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, PHONE = ROOT / "examples", ROOT / "toolkit" / "web" / "phone"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bright_or_dark() -> nn.Module:
    """Knows bright pictures (values above 0) from dark ones."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    layer = model[1]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-1.0], [1.0]]).expand(2, 16))
        layer.bias.zero_()
    return model


def test_the_camera_loop_names_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessing = Images(classes=("dark", "bright"), mean=(0.5,))
    deploy(bright_or_dark(), "full", (1, 4, 4), tmp_path / "b", preprocessing=preprocessing,
           training=TrainingConfig())  # fmt: skip
    program, pictures = load("camera_loop"), [255, 0, None, 140, 128]
    for number, grey in enumerate(pictures):
        file = tmp_path / f"{number}.png"
        if grey is None:
            file.write_bytes(b"cut off")
        else:
            Image.fromarray(np.full((9, 7), grey, np.uint8)).save(file)
    camera = "import shutil, sys; number = len(list(__import__('pathlib').Path('.').glob('seen*')))"
    camera += "; shutil.copy(f'{number}.png', sys.argv[1]); open(f'seen{number}', 'w')"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program.time, "sleep", lambda _: None)
    program.watch(
        tmp_path / "b", tmp_path / "now.png", [sys.executable, "-c", camera], len(pictures)
    )
    said = capsys.readouterr()
    assert said.out == "bright (100%)\ndark (100%)\nbright (83%)\n"
    assert "is not a picture" in said.err


def test_the_card_is_enough(tmp_path: Path) -> None:
    """The bytes of the samples and the graph are all that the two programs share with PyTorch."""
    folder, samples, right = deployed_for_programs(tmp_path)
    np.save(tmp_path / "samples.npy", samples)
    program = load("predict_by_card")
    np.testing.assert_allclose(program.probabilities(folder, samples), right, atol=1e-5)
    done = subprocess.run(
        [sys.executable, EXAMPLES / "predict_by_card.py", folder, tmp_path / "samples.npy"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"{right.round(4)}\n"


@pytest.mark.web
def test_the_card_is_enough_in_javascript(tmp_path: Path) -> None:
    folder, samples, right = deployed_for_programs(tmp_path)
    (tmp_path / "samples.json").write_text(json.dumps(samples.tolist()))
    shutil.copy(EXAMPLES / "predict_by_card.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(PHONE.parent / "node_modules")
    done = subprocess.run(
        ["node", "predict_by_card.mjs", folder, "samples.json"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = ("dark", "bright")
    assert done.stdout.splitlines() == [f"{names[int(p.argmax())]} {p.max():.4f}" for p in right]


def deployed_for_programs(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """A bundle, samples for it, and the probabilities that PyTorch gives them."""
    model, out = bright_or_dark(), tmp_path / "bundle"
    preprocessing = Images(classes=("dark", "bright"), mean=(0.5,))
    deploy(model, "full", (1, 4, 4), out, preprocessing=preprocessing)
    samples = np.random.default_rng(0).normal(0, 0.1, (4, 1, 4, 4)).astype(np.float32)
    with torch.no_grad():
        right = torch.softmax(model(torch.from_numpy(samples)), 1).numpy()
    return out, samples, right


@pytest.mark.long  # starts a dozen processes: 20 seconds on two idle cores
def test_a_federation_without_central_data(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes train, judge and predict. PyTorch predicts the same with their weights."""
    folder = tmp_path / "work"
    program = load("no_central_data")
    shorter = program.FEDERATION.replace("rounds = 3", "rounds = 2")
    monkeypatch.setattr(program, "FEDERATION", shorter)
    program.main(folder)
    said = capfd.readouterr().out
    model = load_model("toolkit.models:digits_cnn", folder / "state" / "global.safetensors").eval()
    with torch.no_grad():
        right = torch.softmax(model(torch.from_numpy(np.load(folder / "new.npy"))), 1)
    for number, row in enumerate(right.numpy(), 1):
        line = f"new.npy, sample {number}  {row.argmax()}      {row.max():.1%}"
        assert line in said.splitlines()
    card = json.loads((folder / "deployed" / "board" / "card.json").read_bytes())
    assert (card["round"], card["quality"]) == (2, None)
    judged = card["device_quality"]
    assert judged["devices"] == judged["kind"]["devices"] == 3
    samples = sum(len(np.load(folder / f"device{n}.npz")["y"]) for n in range(3))
    assert abs(judged["samples"] - 0.2 * samples) <= 3
    assert f"the whole model on the devices: accuracy {judged['accuracy']:.2%}," in said
