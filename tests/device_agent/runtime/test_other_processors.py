"""Blocked graphs on an emulated processor with AVX2, whose blocks have 8 channels."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bundles import write_noise
from device_agent.formats.update import read_update
from device_agent.training.bundle_training import train_bundle
from device_agent.training.training_options import TrainingOptions
from edgetailor import TrainingConfig, split
from exporters.export import export
from toolkit.submodels.global_model import from_model

SHAPE, CLASSES = (3, 9, 8), 4
SCRIPT = """
import json, sys
from pathlib import Path
from device_agent.formats.graph_forms import BLOCKS, blocked_form
from device_agent.runtime.blocked_probe import FOLDER, best_form, block_size, runs
from device_agent.training.bundle_training import train_bundle
from device_agent.training.training_options import TrainingOptions
bundle, data, out = map(Path, sys.argv[1:])
train_bundle(bundle, str(data), out, TrainingOptions(threads=1))
right = [block for block in BLOCKS if runs(FOLDER / f"{blocked_form(block)}.onnx")]
print(json.dumps([block_size(), right, best_form(bundle / "train.onnx").name]))
"""


def model() -> nn.Module:
    """Channels that fit blocks of 8, some of them also blocks of 16."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.MaxPool2d(2)),
        *(
            nn.Conv2d(8, 24, 3, 2, 1),
            nn.Sigmoid(),
            nn.Conv2d(24, 24, 3, 1, 1, groups=24),
            nn.Tanh(),
        ),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES)),
    )


@pytest.mark.long
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="make test-long installs qemu")
def test_training_on_an_emulated_haswell(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    made = model()
    # Batches of 8 fill a block of samples, the last one of 3 does not.
    submodel = split(made, "full", SHAPE, TrainingConfig(batch_size=8, epochs=2, momentum=0.9))
    base = from_model(made)
    export(submodel.program, submodel.cut(base), tmp_path / "b", base=base.fingerprint())
    write_noise(tmp_path / "data.npz", 11, seed, SHAPE, CLASSES)
    data = str(tmp_path / "data.npz")
    (tmp_path / "b" / "train.nchwc16.onnx").unlink(missing_ok=True)
    train_bundle(tmp_path / "b", data, tmp_path / "here", TrainingOptions(threads=1))
    emulator = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        [*emulator, str(tmp_path / "b"), data, str(tmp_path / "there")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [8, [8], "train.nchwc8.onnx"]
    (_, here), (_, there) = read_update(tmp_path / "here"), read_update(tmp_path / "there")
    for name, value in here.items():
        np.testing.assert_allclose(there[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
