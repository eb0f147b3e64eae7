"""A device compares a first step in its form of the graphs with that of the plain graphs."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.graph_forms import BLOCKS, blocked_form, form_file, form_of
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.update import read_update
from device_agent.runtime.blocked_probe import block_size
from device_agent.training.memory_limits import Usage
from device_agent.training.runtime_option import has_forms, with_runtime
from device_agent.training.training_options import TrainingOptions
from device_agent.training.trials import form_check
from device_agent.training.trials.fastest_runtime import objection
from device_agent.training.trials.form_check import with_right_forms
from device_agent.training.trials.runtime_trial import Trial
from edgetailor import TrainingConfig, split
from exporters.export import export
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

pytestmark = pytest.mark.skipif(block_size() is None, reason="this runtime has no blocks")
SHAPE, CLASSES = (3, 7, 6), 4
OPTIONS = TrainingOptions(threads=1)


def cnn(norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 16):
        norms = [nn.BatchNorm2d(16)] if norm else []
        layers += [nn.Conv2d(channels, 16, 3), *norms, nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 3 * 2, CLASSES))


@pytest.fixture(scope="module", params=["full", "slice:2", "adamw"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose training step has blocked forms.

    A bias before a batch norm has no gradient but roundings, which Adam makes as large as others.
    """
    torch.manual_seed(5)
    adam = request.param == "adamw"
    model, spec = cnn(norm=adam), "full" if adam else request.param
    config = TrainingConfig(batch_size=4, epochs=2, optimizer="adamw" if adam else "sgd")
    submodel = split(model, spec, SHAPE, config)
    out, base = tmp_path_factory.mktemp("forms") / "bundle", from_model(model)
    export(submodel.program, submodel.cut(base), out, base=base.fingerprint(), check=False)
    return out


@pytest.fixture
def data(tmp_path: Path, seed: int) -> str:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(11, *SHAPE)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=draw.integers(CLASSES, size=11))
    return str(tmp_path / "data.npz")


def with_other_block(bundle: Path, signature: str, out: Path) -> Bundle:
    """A copy whose form of `signature` is that of another block, by the right name and hash."""
    shutil.copytree(bundle, out)
    graph, own = open_bundle(bundle).manifest.signatures[signature].graph, block_size()
    [other] = [form_file(graph, blocked_form(block)) for block in BLOCKS if block != own]
    form = form_file(graph, blocked_form(own or 0))
    shutil.copy(out / other, out / form)
    told = msgspec.json.decode((out / MANIFEST).read_bytes())
    told["files"][form] = msgspec.to_builtins(fingerprint_file(out / form))
    (out / MANIFEST).write_bytes(msgspec.json.encode(told))
    return open_bundle(out)


def checked(plain: Bundle, folder: Path) -> bool:
    """Whether the form of `plain` that this device runs is trusted."""
    assert with_runtime(plain, None) is not plain
    where = (Usage.now(), folder / "trials.json")
    found = with_right_forms(plain, OPTIONS, *where, fits=lambda manifest: True, scratch=folder)
    assert has_forms(found) == (found is plain)
    return has_forms(found)


def test_a_right_form_is_trusted_and_the_check_remembered(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    plain = open_bundle(exported)
    assert checked(plain, tmp_path)
    monkeypatch.setattr(form_check, "difference", lambda *given: pytest.fail("checked twice"))
    assert checked(plain, tmp_path)
    assert said == []


def test_a_form_of_another_block_is_not_used(
    exported: Path, tmp_path: Path, data: str, said: list[str]
) -> None:
    wrong = with_other_block(exported, "train", tmp_path / "wrong")
    shutil.copytree(exported, tmp_path / "plain", ignore=shutil.ignore_patterns("*.nchwc*"))
    for number in range(2):
        updates = []
        for bundle in (wrong.folder, tmp_path / "plain"):
            out = tmp_path / f"{bundle.name}.{number}"
            train_bundle(bundle, data, out, threads=1, trials=tmp_path / "trials.json")
            updates.append(read_update(out)[1])
        ours, theirs = updates
        assert all(np.array_equal(ours[name], value) for name, value in theirs.items())
    assert len([line for line in said if "trains its plain graphs" in line]) == 2


def test_a_form_that_the_runtime_refuses_is_not_used(
    exported: Path, tmp_path: Path, said: list[str]
) -> None:
    shutil.copytree(exported, tmp_path / "bundle")
    plain = open_bundle(tmp_path / "bundle")
    formed = with_runtime(plain, None)
    for signature in formed.manifest.signatures:
        if form_of(formed.graph(signature).name):
            formed.graph(signature).write_bytes(b"no graph")
    assert not checked(plain, tmp_path)
    assert "trains its plain graphs" in said[-1]


@pytest.mark.parametrize("stops", [MemoryError, None], ids=["no memory", "not finite"])
def test_a_check_that_proves_nothing_keeps_the_form_and_is_repeated(
    stops: type[Exception] | None,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
) -> None:
    step = form_check.first_step

    def other(*given: Any, **more: Any) -> Trial:
        if stops is not None:
            raise stops
        return msgspec.structs.replace(step(*given, **more), losses=(float("nan"),))

    wrong = with_other_block(exported, "train", tmp_path / "wrong")
    monkeypatch.setattr(form_check, "first_step", other)
    assert checked(wrong, tmp_path)
    assert said == []
    monkeypatch.undo()
    assert not checked(wrong, tmp_path)


def test_no_other_runtime_is_blamed_for_a_wrong_form(
    exported: Path, tmp_path: Path, data: str
) -> None:
    """Runtimes are compared with the form only after it was found to be right."""
    pytest.importorskip("openvino", reason="needs the extra [openvino]")
    wrong = with_other_block(exported, "train", tmp_path / "wrong")
    options = {"runtime": "openvino", "threads": 1, "trials": tmp_path / "trials.json"}
    found = train_bundle(wrong.folder, data, tmp_path / "update", **options)
    assert found.record.steps > 0


def test_a_wrong_gradient_of_a_deep_net_is_seen(tmp_path: Path) -> None:
    """Nudges of the weights flip masks of ReLUs in such nets, which must not excuse it."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(12):
        layers += [nn.Conv2d(3 if number == 0 else 16, 16, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(16), nn.ReLU(), *([nn.MaxPool2d(2)] if number % 4 == 3 else [])]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, CLASSES))
    submodel = split(model, "full", (3, 16, 16), TrainingConfig(batch_size=4))
    base = from_model(model)
    export(
        submodel.program, submodel.cut(base), tmp_path / "b", base=base.fingerprint(), check=False
    )
    bundle = open_bundle(tmp_path / "b")
    formed = with_runtime(bundle, None)
    ours = form_check.first_step(bundle, 1, tmp_path)
    theirs = form_check.first_step(formed, 1, tmp_path)
    assert objection(ours, theirs, lambda: pytest.fail("they are close")) is None
    nudged = form_check.first_step(bundle, 1, tmp_path, nudged=True)
    for name, factor in itertools.product(ours.changes, (-1.0, 0.0, 2.0, float("nan"))):
        changes = theirs.changes | {name: [factor * change for change in theirs.changes[name]]}
        wrong = msgspec.structs.replace(theirs, changes=changes)
        assert objection(ours, wrong, lambda: nudged) is not None, name
