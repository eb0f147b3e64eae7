"""A device without blocked convolutions runs Winograd's form of a graph if that is faster there."""

import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from bundles import write_noise
from device_agent.federation.device_state import DeviceState
from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.graph_forms import BLOCKS, WINOGRAD, form_of
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.formats.update import read_update
from device_agent.runtime import blocked_probe, graph_form, winograd_probe
from device_agent.runtime.blocked_probe import block_size
from device_agent.runtime.graph_form import device_form
from device_agent.runtime.winograd_probe import PROBE, RUNS, gains, multiplies_faster
from device_agent.training import form_choice, schedule_interpreter
from device_agent.training.bundle_training import train_bundle
from device_agent.training.execution_plan import plan_execution
from device_agent.training.form_check import with_checked_form
from device_agent.training.form_choice import in_device_form
from device_agent.training.memory_limits import Usage
from device_agent.training.memory_refusal import needed_bytes
from device_agent.training.training_options import TrainingOptions
from edgetailor import TrainingConfig, split
from exporters.export import export
from exporters.runtime_probes import write
from form_cases import with_negative_kernels
from toolkit.submodels.global_model import from_model

SHAPE, CLASSES = (3, 9, 8), 4
FORMS = (
    (None, True, WINOGRAD),
    (None, False, None),
    (16, True, "nchwc16"),
    (8, False, "nchwc8"),
)
"""The block of a runtime, whether Winograd's form is faster, and the form that the device runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose graphs have a form by Winograd's method."""
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.Tanh(), nn.Conv2d(32, 32, 3)]
    end = [nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)]
    model = nn.Sequential(*layers, *end)
    submodel = split(model, "full", SHAPE, TrainingConfig(batch_size=4, epochs=2))
    out, base = tmp_path_factory.mktemp("winograd") / "bundle", from_model(model)
    export(submodel.program, submodel.cut(base), out, base=base.fingerprint(), check=False)
    return out


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int | None, bool], None]]:
    """Tells the agent the block of its runtime, and whether Winograd's form is faster."""

    def told(block: int | None, faster: bool) -> None:
        device_form.cache_clear()
        for module in (graph_form, blocked_probe, form_choice):
            monkeypatch.setattr(module, "block_size", lambda: block)
        monkeypatch.setattr(graph_form, "multiplies_faster", lambda: faster)

    yield told
    device_form.cache_clear()


def graph_of(bundle: Bundle) -> str:
    return bundle.graph("train").name


def test_the_probes_are_what_the_program_writes(tmp_path: Path) -> None:
    write(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in PROBE.parent.iterdir()}


@pytest.mark.parametrize(("other_s", "faster"), [(0.5, True), (0.94, True), (0.96, False)])
def test_the_faster_form_by_the_clock(other_s: float, faster: bool) -> None:
    """The two forms take turns; of each, the shortest run counts."""
    took = [value for run in range(RUNS) for value in (1.0 + run, other_s + 2 * run)]
    edges = [edge for seconds in took for edge in (0.0, seconds)]
    assert gains(PROBE, iter(edges).__next__) is faster


FORM = PROBE.with_name("convolutions.winograd.onnx")


@pytest.mark.parametrize(
    ("content", "gained"),
    [
        (FORM.read_bytes(), True),
        (with_negative_kernels(FORM.read_bytes()), False),
        (b"no graph", False),
        (None, False),
    ],
    ids=["right", "wrong", "no graph", "missing"],
)
def test_a_form_that_is_wrong_or_missing_is_not_used(
    tmp_path: Path, content: bytes | None, gained: bool
) -> None:
    """However fast it is by the clock."""
    shutil.copy(PROBE, tmp_path)
    if content is not None:
        (tmp_path / FORM.name).write_bytes(content)
    clock = iter([0.0, 1.0, 0.0, 0.1] * RUNS).__next__
    assert gains(tmp_path / PROBE.name, clock) is gained


@pytest.mark.parametrize("block", [8, 16])
def test_the_probe_is_not_made_where_convolutions_are_blocked(
    block: int, say: Callable[[int | None, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(block, True)
    monkeypatch.setattr(graph_form, "multiplies_faster", lambda: pytest.fail("was asked"))
    assert device_form() == f"nchwc{block}"


def test_the_graphs_that_are_opened(
    folder: Path, say: Callable[[int | None, bool], None], tmp_path: Path
) -> None:
    opened = open_bundle(folder)
    for block, faster, form in FORMS:
        say(block, faster)
        assert form_of(graph_of(in_device_form(opened))) == form
    say(None, True)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "train.winograd.onnx").unlink()
    assert graph_of(in_device_form(open_bundle(tmp_path / "copy"))) == "train.onnx"


def collect(state: DeviceState, folder: Path, fetched: list[str]) -> None:
    """Let a device fetch the bundle in `folder`; notes the names of the files that it fetches."""

    def fetch(offer: FileOffer, to: Path) -> None:
        fetched.append(offer.name)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes((folder / offer.name).read_bytes())

    entries = {path.name: fingerprint_file(path) for path in folder.iterdir()}
    offers = [FileOffer(name=n, size=e.size, sha256=e.sha256) for n, e in entries.items()]
    state.collect(offers, fetch)


def test_other_forms_are_not_fetched(
    folder: Path, say: Callable[[int | None, bool], None], tmp_path: Path
) -> None:
    fetched: list[str] = []
    for block, faster, form in FORMS:
        say(block, faster)
        fetched.clear()
        state = DeviceState(tmp_path / f"{block}-{faster}")
        collect(state, folder, fetched)
        assert {form_of(name) for name in fetched} == {None, form}
        assert sorted(fetched) == sorted(path.name for path in state.bundle.iterdir())
        assert open_bundle(state.bundle).manifest.submodel == "full"


def test_a_form_that_does_not_fit_is_not_used(
    folder: Path, say: Callable[[int | None, bool], None]
) -> None:
    say(None, True)
    opened = open_bundle(folder)
    faster = in_device_form(opened)
    plain_need, need = (needed_bytes(bundle.manifest, False) for bundle in (opened, faster))
    assert plain_need is not None
    assert need is not None
    assert plain_need[0] < need[0]
    for allowed, form in ((need[0], WINOGRAD), (need[0] - 1, None)):
        options = TrainingOptions(max_memory=allowed)
        assert plan_execution(opened, options, Usage(0, 0, 0)).form == form


def test_a_form_of_unknown_size_is_not_used(
    folder: Path, say: Callable[[int | None, bool], None]
) -> None:
    """Limits that the plain form is checked by must hold for the other one, too."""
    say(None, True)
    opened = open_bundle(folder)
    signatures = {
        name: msgspec.structs.replace(signature, winograd_peak_bytes=None)
        for name, signature in opened.manifest.signatures.items()
    }
    manifest = msgspec.structs.replace(opened.manifest, signatures=signatures)
    chosen = in_device_form(replace(opened, manifest=manifest))
    assert form_of(graph_of(chosen)) is None


def test_probes_are_made_before_memory_is_limited(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under a limit they may fail, and the agent would train the plain form."""
    bundle, limits = tmp_path / "bundle", []
    shutil.copytree(folder, bundle, ignore=shutil.ignore_patterns("*.winograd.onnx"))

    def asked(probe: Path) -> bool:
        limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0])
        return False

    block_size.cache_clear()
    monkeypatch.setattr(blocked_probe, "runs", asked)
    monkeypatch.setattr(graph_form, "multiplies_faster", lambda: False)
    data = tmp_path / "samples.npz"
    np.savez(data, x=np.zeros((4, *SHAPE), np.float32), y=np.zeros(4, np.int64))
    options = TrainingOptions(threads=1, max_memory=Usage.now().resident + 2**30)
    train_bundle(bundle, str(data), tmp_path / "limited", options)
    block_size.cache_clear()
    device_form.cache_clear()
    assert limits == [resource.RLIM_INFINITY] * len(BLOCKS)


def test_both_forms_train_to_the_same_update(
    folder: Path, say: Callable[[int | None, bool], None], tmp_path: Path, seed: int
) -> None:
    write_noise(tmp_path / "data.npz", 11, seed, SHAPE, CLASSES)
    updates = []
    for faster in (True, False):
        say(None, faster)
        out = tmp_path / str(faster)
        options = TrainingOptions(threads=1, validation=0.2)
        train_bundle(folder, str(tmp_path / "data.npz"), out, options)
        updates.append(read_update(out)[1])
    ours, plain = updates
    assert any((ours[name] != plain[name]).any() for name in plain)  # two forms, indeed
    for name, value in plain.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("faster", [True, False])
def test_a_killed_training_continues_in_the_form_in_which_it_began(
    folder: Path,
    say: Callable[[int | None, bool], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    faster: bool,
) -> None:
    """After the restart, the device measures the other form as the faster one."""
    write_noise(tmp_path / "data.npz", 16, seed, SHAPE, CLASSES)
    monkeypatch.setattr(schedule_interpreter, "CHECKPOINT_S", 0.0)
    state = DeviceState(tmp_path / "state")

    def train(bundle: Path, out: Path, stop_at: int = 0) -> None:
        batches = iter(range(1, 1000))

        def stop() -> None:
            if next(batches) == stop_at:
                raise KeyboardInterrupt

        options, data = TrainingOptions(threads=1), str(tmp_path / "data.npz")
        train_bundle(bundle, data, out, options, on_batch=stop, form_checks=tmp_path / "forms.json")

    say(None, faster)
    train(folder, tmp_path / "whole")
    collect(state, folder, [])
    with pytest.raises(KeyboardInterrupt):
        train(state.bundle, state.update, stop_at=4)
    say(None, not faster)
    collect(state, folder, [])
    train(state.bundle, state.update)
    whole, resumed = (read_update(out)[1] for out in (tmp_path / "whole", state.update))
    assert {name: array.tobytes() for name, array in resumed.items()} == {
        name: array.tobytes() for name, array in whole.items()
    }


def test_a_wrong_form_is_not_trained(
    folder: Path, say: Callable[[int | None, bool], None], tmp_path: Path
) -> None:
    say(None, True)
    shutil.copytree(folder, tmp_path / "wrong")
    graph = tmp_path / "wrong" / "train.winograd.onnx"
    graph.write_bytes(with_negative_kernels(graph.read_bytes()))
    right = open_bundle(folder)
    for bundle in (right, replace(right, folder=tmp_path / "wrong")):
        plan = plan_execution(bundle, TrainingOptions(threads=1), Usage.now())
        checked = with_checked_form(plan, tmp_path / f"{bundle.folder.name}.json", tmp_path)
        assert checked.form == (WINOGRAD if bundle is right else None)


def test_the_probe_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[Path] = []

    def measured(probe: Path) -> bool:
        probes.append(probe)
        return True

    monkeypatch.setattr(winograd_probe, "gains", measured)
    multiplies_faster.cache_clear()
    assert [multiplies_faster(), multiplies_faster()] == [True, True]
    multiplies_faster.cache_clear()
    assert probes == [PROBE]
