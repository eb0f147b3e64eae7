"""The files of docs/papers: all are read, and all run on small files of their datasets' formats."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataset_files import write_cifar, write_leaf, write_mnist, write_tiny_imagenet
from parameters import some_quick
from toolkit.simulation.simulate import simulate
from toolkit.simulation.simulation_config import load_simulation

PAPERS = Path(__file__).resolve().parents[3] / "docs" / "papers"
FILES = sorted(PAPERS.glob("*/*.toml"))
NAMES = [f"{file.parent.name}/{file.stem}" for file in FILES]
SAMPLES = 30
QUICK = ("mnist/tdpfed-full", "mnist/tdpfed-cp", "digits/embracingfl-slice")


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_every_file_is_read(file: Path) -> None:
    config = load_simulation(file)
    assert file.read_text().startswith("# ")
    assert len(config.specs()) == sum(kind.places or 0 for kind in config.devices)


WRITE: dict[str, Callable[[Path, np.random.Generator], object]] = {
    "cifar10": lambda folder, draw: write_cifar(folder, "cifar10", draw, SAMPLES),
    "cifar100": lambda folder, draw: write_cifar(folder, "cifar100", draw, SAMPLES),
    "fashion": write_mnist,
    "femnist": lambda folder, draw: write_leaf(folder, draw, writers=256),
    "mnist": write_mnist,
    "tiny-imagenet": write_tiny_imagenet,
}


@pytest.mark.parametrize(
    "file", some_quick(FILES, *(PAPERS / f"{name}.toml" for name in QUICK)), ids=NAMES
)
def test_a_short_version_runs(file: Path, tmp_path: Path, seed: int) -> None:
    """Everything but the number of rounds, of local steps and of clients stays."""
    text = file.read_text()
    if file.parent.name != "digits":
        place = tomllib.loads(text)["simulation"]["data"]
        text = text.replace(place, place.strip("/"))
        place = place.strip("/")
        (tmp_path / place).mkdir(parents=True)
        WRITE[file.parent.name](tmp_path / place, np.random.default_rng(seed))
    for pattern, new in (
        (r"(?m)^rounds = \d+", "rounds = 1"),
        (r"(?m)^(steps|epochs) = \d+", r"\1 = 1"),
        (r"(?m)^participation = .*", ""),
        (r"(?m)^batch_size = \d+", "batch_size = 8"),
        (r"(?m)^count = \d+", "count = 2"),
        (r"personal-steps=\d+,factor-steps=\d+", "personal-steps=1,factor-steps=1"),
    ):
        text = re.sub(pattern, new, text)
    (tmp_path / "short.toml").write_text(text)
    config = load_simulation(tmp_path / "short.toml")
    (result,) = simulate(tmp_path / "short.toml", tmp_path / "out")
    whole = config.simulation.baseline == "centralised"
    assert result.clients + result.diverged == (1 if whole else len(config.specs()))
    assert result.clients
