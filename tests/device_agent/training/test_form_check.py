"""A device compares a first step in its form of the graphs with that of the plain graphs."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from bundles import write_noise
from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.graph_forms import BLOCKS, blocked_form, form_file, form_of
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.update import read_update
from device_agent.runtime import onnx_runtime
from device_agent.runtime.blocked_probe import block_size
from device_agent.training import form_check
from device_agent.training.execution_plan import ExecutionPlan, plan_execution
from device_agent.training.form_check import with_checked_form
from device_agent.training.form_choice import in_device_form
from device_agent.training.memory_limits import Usage
from device_agent.training.step_comparison import FirstStep, objection
from device_agent.training.training_options import TrainingOptions
from edgetailor import TrainingConfig, split
from exporters.export import export
from parameters import some_long
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


@pytest.fixture(scope="module", params=some_long(["full", "slice:2", "adamw"], "slice:2"))
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
    write_noise(tmp_path / "data.npz", 11, seed, SHAPE, CLASSES)
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


def trusted(plain: Bundle, folder: Path, options: TrainingOptions = OPTIONS) -> bool:
    """Whether the form of `plain` that this device runs is trusted."""
    plan = plan_execution(plain, options, Usage.now())
    assert plan.form is not None
    checked = with_checked_form(plan, folder / "forms.json", folder)
    assert checked.bundle is (plan.bundle if checked.form else plain)
    return checked.form is not None


def test_a_right_form_is_trusted_and_the_check_remembered(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    plain = open_bundle(exported)
    assert trusted(plain, tmp_path)
    monkeypatch.setattr(form_check, "difference", lambda *given: pytest.fail("checked twice"))
    assert trusted(plain, tmp_path)
    assert said == []


@pytest.mark.parametrize("other", ["threads", "memory", "graph", "version", "damage"])
def test_what_was_not_checked_is_checked(
    other: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, options, checked = open_bundle(exported), OPTIONS, list[ExecutionPlan]()
    monkeypatch.setattr(form_check, "difference", lambda plan, scratch: checked.append(plan))
    assert trusted(plain, tmp_path)
    match other:
        case "threads":
            options = TrainingOptions(threads=2)
        case "memory":
            options = TrainingOptions(threads=1, max_memory=2**40)
        case "graph":  # as another version of the server writes it
            plain = replace(plain, folder=shutil.copytree(exported, tmp_path / "later"))
            plain.graph("train").write_bytes(plain.graph("train").read_bytes() + b"\x12\x00")
        case "version":
            monkeypatch.setattr(onnx_runtime, "description", lambda: "onnxruntime 99")
        case _:
            file = tmp_path / "forms.json"
            file.write_bytes(file.read_bytes()[:-3])
    for _ in range(2):
        assert trusted(plain, tmp_path, options)
    assert len(checked) == 2


def test_a_check_that_cannot_be_remembered_is_made(
    exported: Path, tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "forms.json").mkdir()
    assert trusted(open_bundle(exported), tmp_path)
    [line] = said
    assert line.startswith("Cannot store the result of a check of the graph's form")


def test_a_form_of_another_block_is_not_used(
    exported: Path, tmp_path: Path, data: str, said: list[str]
) -> None:
    wrong = with_other_block(exported, "train", tmp_path / "wrong")
    shutil.copytree(exported, tmp_path / "plain", ignore=shutil.ignore_patterns("*.nchwc*"))
    for number in range(2):
        updates = []
        for bundle in (wrong.folder, tmp_path / "plain"):
            out = tmp_path / f"{bundle.name}.{number}"
            train_bundle(bundle, data, out, threads=1, form_checks=tmp_path / "forms.json")
            updates.append(read_update(out)[1])
        ours, theirs = updates
        assert all(np.array_equal(ours[name], value) for name, value in theirs.items())
    assert len([line for line in said if "trains with its plain graphs" in line]) == 2


def test_a_form_that_the_runtime_refuses_is_not_used(
    exported: Path, tmp_path: Path, said: list[str]
) -> None:
    shutil.copytree(exported, tmp_path / "bundle")
    plain = open_bundle(tmp_path / "bundle")
    formed = in_device_form(plain)
    for signature in formed.manifest.signatures:
        if form_of(formed.graph(signature).name):
            formed.graph(signature).write_bytes(b"no graph")
    assert not trusted(plain, tmp_path)
    assert "trains with its plain graphs" in said[-1]


@pytest.mark.parametrize("stops", [MemoryError, None], ids=["no memory", "not finite"])
def test_a_check_that_proves_nothing_keeps_the_form_and_is_repeated(
    stops: type[Exception] | None,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
) -> None:
    step = form_check.first_step

    def other(*given: Any, **more: Any) -> FirstStep:
        if stops is not None:
            raise stops
        return replace(step(*given, **more), losses=(float("nan"),))

    wrong = with_other_block(exported, "train", tmp_path / "wrong")
    monkeypatch.setattr(form_check, "first_step", other)
    assert trusted(wrong, tmp_path)
    assert said == []
    monkeypatch.undo()
    assert not trusted(wrong, tmp_path)


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
    formed = in_device_form(bundle)
    ours = form_check.first_step(bundle, 1, tmp_path)
    theirs = form_check.first_step(formed, 1, tmp_path)
    assert objection(ours, theirs, lambda: pytest.fail("they are close")) is None
    nudged = form_check.first_step(bundle, 1, tmp_path, nudged=True)
    for name, factor in itertools.product(ours.changes, (-1.0, 0.0, 2.0, float("nan"))):
        wrong = replace(theirs, changes={**theirs.changes, name: factor * theirs.changes[name]})
        assert objection(ours, wrong, lambda: nudged) is not None, name
