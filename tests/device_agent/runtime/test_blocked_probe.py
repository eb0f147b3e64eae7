"""A device finds out by a run which form of a graph it can open, and fetches no other."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from bundles import write_noise
from device_agent.formats.bundle import open_bundle
from device_agent.formats.graph_forms import BLOCKS, blocked_form, form_file, form_of
from device_agent.formats.update import read_update
from device_agent.runtime import blocked_probe, graph_form
from device_agent.runtime.blocked_probe import FOLDER, best_form, block_size, runs
from device_agent.runtime.graph_check import check_graph
from device_agent.runtime.graph_form import device_form
from device_agent.training.bundle_training import train_bundle
from device_agent.training.training_options import TrainingOptions
from edgetailor import TrainingConfig, split
from exporters.export import export
from exporters.runtime_probes import probe
from profiles.errors import BundleError
from refusals import refused
from toolkit.submodels.global_model import from_model

NO_BLOCKS = pytest.mark.skipif(block_size() is None, reason="this runtime has no blocks")
SHAPE, CLASSES = (3, 7, 6), 4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose training step has a blocked form."""
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Tanh(), nn.Conv2d(16, 16, 3), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 3 * 2, CLASSES))
    submodel = split(model, "full", SHAPE, TrainingConfig(batch_size=4, epochs=2))
    out, base = tmp_path_factory.mktemp("blocked") / "bundle", from_model(model)
    export(submodel.program, submodel.cut(base), out, base=base.fingerprint(), check=False)
    return out


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For tests that say which block the runtime has."""
    yield monkeypatch
    block_size.cache_clear()
    device_form.cache_clear()


def say(told: pytest.MonkeyPatch, block: int | None) -> None:
    block_size.cache_clear()
    device_form.cache_clear()
    told.setattr(blocked_probe, "runs", lambda file: file.stem == blocked_form(block or 0))
    told.setattr(graph_form, "multiplies_faster", lambda: False)


def test_the_probes_are_what_the_program_writes() -> None:
    for block in BLOCKS:
        assert (FOLDER / f"{blocked_form(block)}.onnx").read_bytes() == probe(block)


def test_at_most_one_block_is_right() -> None:
    """A probe of another block runs and gives other numbers, or is refused."""
    assert sum(runs(FOLDER / f"{blocked_form(block)}.onnx") for block in BLOCKS) <= 1


@NO_BLOCKS
def test_a_wrong_block_runs_and_gives_wrong_numbers() -> None:
    """Why the processor's name or the runtime's version is never asked."""
    wrong = next(block for block in BLOCKS if block != block_size())
    path = FOLDER / f"{blocked_form(wrong)}.onnx"
    draw = np.random.default_rng(0)
    shapes = blocked_probe.SHAPES
    given = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    plain, blocked = onnxruntime.InferenceSession(path).run(["plain", "blocked"], given)
    assert np.abs(plain - blocked).max() > 0.01 * np.abs(plain).max()
    assert not runs(path)


def test_a_probe_that_cannot_be_opened_means_no_block(tmp_path: Path) -> None:
    assert not runs(tmp_path / "missing.onnx")
    (tmp_path / "16.onnx").write_bytes(b"no graph")
    assert not runs(tmp_path / "16.onnx")


def test_a_bundle_has_a_form_for_every_block(bundle: Path) -> None:
    names = {path.name for path in bundle.iterdir()}
    assert {name for name in names if form_of(name)} == {
        form_file(f"{name}.onnx", blocked_form(block))
        for name in ("train", "predict", "evaluate")
        for block in BLOCKS
    }


@pytest.mark.parametrize("block", [None, *BLOCKS])
def test_the_form_that_is_opened(bundle: Path, told: pytest.MonkeyPatch, block: int | None) -> None:
    say(told, block)
    form = "train.onnx" if block is None else f"train.nchwc{block}.onnx"
    assert best_form(bundle / "train.onnx").name == form
    assert best_form(bundle / "another.onnx").name == "another.onnx"


@NO_BLOCKS
def test_both_forms_train_to_the_same_update(
    bundle: Path, told: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    write_noise(tmp_path / "data.npz", 11, seed, SHAPE, CLASSES)
    updates = []
    for block in (block_size(), None):
        say(told, block)
        out = tmp_path / str(block)
        train_bundle(bundle, str(tmp_path / "data.npz"), out, TrainingOptions(threads=1))
        updates.append(read_update(out)[1])
    blocked, plain = updates
    assert any((blocked[name] != plain[name]).any() for name in plain)  # two forms, indeed
    for name, value in plain.items():
        np.testing.assert_allclose(blocked[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_an_altered_form_is_refused(bundle: Path, tmp_path: Path) -> None:
    for path in bundle.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "train.nchwc8.onnx").open("r+b") as file:
        file.seek(100)
        file.write(b"?")
    with pytest.raises(BundleError, match=r"train\.nchwc8\.onnx"):
        open_bundle(tmp_path)


def test_blocked_operators_in_a_plain_graph_are_refused(bundle: Path, tmp_path: Path) -> None:
    form = (bundle / "train.nchwc16.onnx").read_bytes()
    (tmp_path / "train.onnx").write_bytes(form)
    check_graph(bundle / "train.nchwc16.onnx")
    with refused("bundle.unsafe-graph", file="train.onnx"):
        check_graph(tmp_path / "train.onnx")
