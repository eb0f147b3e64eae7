"""A small model's bundles, one for each family, made once in a whole test run, and local data."""

import fcntl
import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from device_agent.data.local_data import load_data
from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.preprocessing import Images, Series
from edgetailor import GlobalModel, TrainingConfig, load_model, split
from exporters.export import export
from exporters.programs.program import with_preprocessing
from toolkit.submodels.global_model import from_model

FAMILIES = {
    "full": "full",
    "low-rank": "low-rank:0.25",
    "slice": "slice:classifier",
    "cp": "cp:2.0",
}
BundleOf = Callable[[str], Path]
"""The path of the bundle of a family, by the family's name."""
SAMPLE_SHAPE = (1, 6, 6)
CLASSES = 8
BATCH = 4
EPOCHS = 2
TRAINING = TrainingConfig(batch_size=BATCH, epochs=EPOCHS, learning_rate=0.05)


def tiny_cnn() -> nn.Sequential:
    """Two convolutions, batch norms and a classifier; its running statistics are not the first."""
    model = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False),
            bn=nn.BatchNorm2d(4),
            act=nn.ReLU(),
            hidden=nn.Conv2d(4, 6, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(6),
            bend=nn.ReLU(),
            flat=nn.Flatten(),
            classifier=nn.Linear(6 * 3 * 3, CLASSES),
        )
    )
    with torch.no_grad():
        for _ in range(5):
            model(2 * torch.randn(16, *SAMPLE_SHAPE) + 1)
    return model


def tiny_model() -> tuple[nn.Module, GlobalModel]:
    """The model that all bundles here are cut from, and its numbers."""
    model = load_model(f"{__name__}:tiny_cnn", seed=1)
    return model, from_model(model)


def export_tiny(family: str, out: Path) -> None:
    """Export the bundle of `family`."""
    model, source = tiny_model()
    submodel = split(model, FAMILIES[family], SAMPLE_SHAPE, TRAINING)
    export(submodel.program, submodel.cut(source), out, base=source.fingerprint(), check=False)


def picture_bundle(out: Path, preprocessing: Images | Series, shape: tuple[int, ...]) -> nn.Module:
    """A linear model of three classes, and its bundle `out`, whose device prepares its samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 3))
    submodel = split(model, "full", shape, TrainingConfig(batch_size=4))
    program = with_preprocessing(submodel.program, preprocessing)
    export(program, submodel.cut(from_model(model)), out, base="0" * 64, check=False)
    return model


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The path that `make` writes, made once even where several workers run the tests."""
    base = factory.getbasetemp()
    shared = base if base.name.startswith("pytest-") else base.parent  # xdist: a folder a worker
    path = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path


def tiny_bundle(factory: pytest.TempPathFactory, family: str) -> Path:
    """The bundle of `family`; read it only."""
    return once(factory, f"tiny-{family}", lambda path: export_tiny(family, path))


def samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` samples whose class is how bright they are, so that there is something to learn."""
    order = np.random.default_rng(seed)
    y = order.integers(CLASSES, size=count)
    x = order.standard_normal((count, *SAMPLE_SHAPE), dtype=np.float32)
    return x + y[:, None, None, None].astype(np.float32), y


def write_data(path: Path, count: int = 21, seed: int = 0) -> Path:
    """An .npz file of `samples`."""
    x, y = samples(count, seed)
    np.savez(path, x=x, y=y)
    return path


def write_noise(path: Path, count: int, seed: int, shape: tuple[int, ...], classes: int) -> None:
    """An .npz file of random samples of `shape`, whose labels say nothing about them."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, *shape)).astype(np.float32)
    np.savez(path, x=x, y=draw.integers(classes, size=count))


def read_data(source: object) -> tuple[np.ndarray, np.ndarray]:
    """The samples and labels at `source`, as a device with one of these bundles sees them."""
    local = load_data(str(source), SAMPLE_SHAPE, LabelRule(CLASSES))
    return local.x, local.y


def rewrite(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` alter the manifest of `bundle`, then make sizes and hashes right again."""
    manifest = json.loads((bundle / MANIFEST).read_bytes())
    change(manifest)
    for name, entry in manifest["files"].items():
        if (bundle / name).is_file():
            present = fingerprint_file(bundle / name)
            entry.update(size=present.size, sha256=present.sha256)
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def diverging(bundle: Path, to: Path) -> Path:
    """A copy of `bundle` whose learning rate makes training diverge at once."""

    def change(manifest: dict[str, Any]) -> None:
        for step in manifest["schedule"][-1]["steps"]:
            step["inputs"]["rate"] = 3e38

    shutil.copytree(bundle, to)
    rewrite(to, change)
    return to


def flip_a_bit(path: Path, at: int = -1) -> None:
    """Alter the byte `at` of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def everything(folder: Path) -> dict[str, bytes]:
    """All files under `folder` by relative path, empty folders too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"folder"
        for path in sorted(folder.rglob("*"))
    }
