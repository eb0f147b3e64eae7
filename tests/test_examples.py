"""The programs in `examples/` run as they are."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from device_agent.formats.preprocessing import Images
from edgetailor import deploy
from toolkit.submodels.hyperparameters import TrainingConfig

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


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
