"""`edgetailor release`, with real models, devices and trials on their samples.

Round 1 has a trained model of the digits, and round 3 the same with its classes permuted.
"""

import json
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load, save

import deployed_digits
from commands import Done, edgetailor, refused
from device_agent.federation import round_loop
from device_agent.federation.newest_model import newest_model
from device_agent.federation.release_folder import DeviceReleases
from device_agent.federation.releases import release_fine_tuning
from device_agent.federation.run_options import RunOptions
from device_agent.formats.protocol.fleet import RoundResult
from device_agent.inference.predictor import Predictor
from device_agent.training.batching import held_out
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.releases.release_changes import add_release
from toolkit.coordinator.releases.release_status import release_status
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.saved_rounds import model_file
from toolkit.deployment.release import make_release
from vector_fleet import VectorModel, assert_soon, running
from vector_releases import StoppedError, in_threads

FILE = deployed_digits.FILE
DEVICES = 4
CONFIG = f"""
model = "{deployed_digits.MODEL}"
input_shape = [1, 8, 8]
rounds = 3
held_out = "held_out.npz"
port = 0

[evaluation]
share = 0.2

[release]
after_rounds = "0.1s"

[[devices]]
name = "desktop"
submodel = "full"
count = {DEVICES}
"""


class IdleModel(VectorModel):
    """Stands in for the model of a coordinator whose rounds are over."""

    def load(self, data: bytes) -> None:
        pass


def permuted(model: bytes) -> bytes:
    """The model with the outputs of the classes in another order."""
    tensors = load(model)
    order = np.roll(np.arange(10), 1)
    heads = [name for name, tensor in tensors.items() if tensor.shape[:1] == (10,)]
    assert len(heads) == 2  # the last layer's weight and bias
    return save(tensors | {name: tensors[name][order] for name in heads})


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A federation whose three rounds are over, and the samples of its devices."""
    shutil.copytree(deployed_digits.federation(tmp_path_factory), tmp_path, dirs_exist_ok=True)
    (tmp_path / FILE).write_text(CONFIG)
    bad = permuted(model_file(tmp_path / "state", 1).read_bytes())
    store = Store(tmp_path / "state")
    store.add_result(RoundResult(round=3, accuracy=0.2, loss=1.0, updates=3), bad)
    store.close()
    (x, y), _ = deployed_digits.split_digits()
    for number in range(DEVICES):
        np.savez(tmp_path / f"{number}.npz", x=x[number::DEVICES], y=y[number::DEVICES])
    return tmp_path


def copied(bundles: Path) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        shutil.copytree(bundles, folder, dirs_exist_ok=True)

    return write


def fleet(server: Server, folder: Path, agreeing: int = 0) -> AbstractContextManager[list[Path]]:
    """Devices that take part, in threads; their state folders. Some agree to fine-tuning."""

    def take_part(number: int, state: Path, stop: threading.Event) -> None:
        def rest(seconds: float) -> None:
            if stop.wait(min(seconds, 0.05)):
                raise StoppedError

        data = str(folder / f"{number}.npz")
        options = RunOptions(data=data, state=state, fine_tune=number < agreeing)
        round_loop.run(options, patience_s=20, sleep=rest)

    return in_threads(server, folder, DEVICES, take_part)


def released(folder: Path, *arguments: str) -> Done:
    return edgetailor("release", FILE, *arguments, cwd=folder).succeeded()


def shown(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(released(folder, "--json").stdout)
    return document


def answers(folder: Path) -> list[tuple[int | None, str]]:
    return [(device.runs, device.answer) for device in release_status(folder / "state")[1]]


def accuracy(state: Path, folder: Path) -> float:
    """The accuracy of the release on a device, computed by onnxruntime alone."""
    bundle = DeviceReleases(state).current()
    assert bundle is not None
    session = onnxruntime.InferenceSession(bundle / "predict.onnx")
    with np.load(folder / "held_out.npz") as data:
        (logits,) = session.run(None, {session.get_inputs()[0].name: data["x"]})
        return float((logits.argmax(1) == data["y"]).mean())


def test_devices_refuse_a_bad_release_and_go_back(folder: Path) -> None:
    config = load_config(folder / FILE)
    with running(config, IdleModel()) as server, fleet(server, folder) as states:
        assert "Release 1, the model after round 1" in released(folder, "best").stderr
        assert_soon(lambda: answers(folder) == [(1, "taken")] * DEVICES, 60)
        assert all(accuracy(state, folder) > 0.9 for state in states)
        assert newest_model(states[0]) == DeviceReleases(states[0]).current()

        released(folder, "3", "--share", "30%", "--then-all")
        assert_soon(lambda: answers(folder).count((1, "not taken")) == 2, 60)
        document = shown(folder)
        assert [r["number"] for r in document["releases"] if r["devices"]] == [2]
        reports = [d["report"] for d in document["devices"] if d["answer"] == "not taken"]
        for report in reports:
            samples = report["after"]["samples"]
            assert samples == round(0.2 * 1437 / DEVICES)
            assert report["after"]["correct"] < 0.2 * samples < 0.8 * report["before"]["correct"]
            assert report["code"] == "release.worse"
        assert answers(folder).count((1, "taken")) == DEVICES - 2
        table = released(folder).stdout
        assert max(map(len, table.splitlines())) <= 80
        assert table.count("not taken") == 2
        assert table.count("own samples; present") == 2

        released(folder, "--back")
        assert_soon(lambda: answers(folder) == [(1, "taken")] * DEVICES, 60)
        again = folder / "state" / "releases" / "1"  # a good one reaches all by itself
        add_release(config.state, 1, ["desktop"], copied(again), share=0.3, then_all=True)
        assert_soon(lambda: answers(folder) == [(3, "taken")] * DEVICES, 60)
        assert [r["devices"] for r in shown(folder)["releases"]][2] is None
        released(folder, "--back")
        assert_soon(lambda: answers(folder) == [(1, "taken")] * DEVICES, 60)
        assert all(accuracy(state, folder) > 0.9 for state in states)
        status = server.coordinator.status()
        assert (status.release, [d.release for d in status.devices]) == (1, [1] * DEVICES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["7"], r"^state has no round 7"),
        (["last"], r"Invalid round 'last'"),
        (["best", "--to", "desk"], r"^The federation has no kind 'desk'.*desktop"),
        (["best", "--share", "10"], r"Invalid share '10': write a percentage"),
        (["best", "--share", "0%"], r"Invalid share '0%'"),
        (["best", "--share", "100%"], r"Invalid share '100%'"),
        (["best", "--then-all"], r"^--then-all needs a --share"),
        (["best", "--all"], r"^Give only one of ROUND, --all and --back"),
        (["--share", "10%"], r"^--share needs a ROUND"),
        (["--all"], r"there is no release"),
        (["--back"], r"there is no release"),
        (["1", "--share", "10%"], r"^No device of the kinds desktop is a member"),
    ],
)
def test_what_is_refused(folder: Path, arguments: list[str], message: str) -> None:
    sentence = refused(folder, "release", FILE, *arguments)
    assert re.search(message, sentence.replace(f"{folder}/", "")), sentence
    assert not (folder / "state" / "releases" / "releases.json").exists()


def test_devices_fine_tune_a_release(folder: Path) -> None:
    """Device 0 calls each digit by the next one; device 3's owner has not agreed."""
    with np.load(folder / "0.npz") as data:
        np.savez(folder / "0.npz", x=data["x"], y=(data["y"] + 1) % 10)
    config = load_config(folder / FILE)
    with running(config, IdleModel()) as server, fleet(server, folder, agreeing=3) as states:
        told = released(folder, "1", "--fine-tune", "60").stderr
        assert "fine-tune it for 60 steps" in told

        def all_tuned() -> bool:
            reports = [device.report for device in release_status(config.state)[1]]
            tuned = [report is not None and report.fine_tuned is not None for report in reports]
            return tuned == [True, True, True, False]

        assert_soon(all_tuned, 60)
        devices = release_status(config.state)[1]
        table = released(folder).stdout
    assert "fine-tune 60" in table
    assert max(map(len, table.splitlines())) <= 80
    for number, device in enumerate(devices[:3]):
        report, state = device.report, states[number]
        assert (device.answer, report.runs) == ("taken", 1)
        pointer = DeviceReleases(state).read()
        assert report.runs_fine_tuned == bool(pointer.current.fine_tuned)
        assert newest_model(state).name == (pointer.current.fine_tuned or pointer.current.bundle)
        with np.load(folder / f"{number}.npz") as data:
            apart = held_out(len(data["y"]), 0.2)
            x, y = data["x"][apart], data["y"][apart]
        best = max(report.after.correct, report.fine_tuned.correct)
        assert (Predictor(newest_model(state)).predict(x).argmax(1) == y).sum() == best
        assert not (state / "fine-tuning").exists()
    first = devices[0].report
    assert first.runs_fine_tuned
    assert first.fine_tuned.correct > first.after.correct + 20
    current = DeviceReleases(states[3]).read().current
    assert (current.number, current.fine_tuned) == (1, None)


def test_a_fine_tuning_ends_when_its_release_is_withdrawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take years."""
    monkeypatch.setattr(release_fine_tuning, "ROUND_CHECK_S", 0.0)
    config = load_config(folder / FILE)
    with running(config, IdleModel()) as server, fleet(server, folder, agreeing=DEVICES) as states:
        released(folder, "1", "--fine-tune", str(2**31 - 1))
        assert_soon(lambda: all((state / "fine-tuning").exists() for state in states), 60)
        released(folder, "--back")
        held = [DeviceReleases(state) for state in states]
        assert_soon(lambda: all(releases.read().current is None for releases in held), 60)


def test_the_coordinator_releases_the_best_model_by_itself(folder: Path) -> None:
    """The last round's model is worse, so that it is not released."""
    text = CONFIG.replace("[release]", '[release]\nwhen = "improved"')
    (folder / FILE).write_text(text)
    config = load_config(folder / FILE)
    with running(config, IdleModel()) as server, fleet(server, folder) as states:
        server.round_worker.make_release = partial(make_release, config)
        assert_soon(lambda: all(DeviceReleases(state).read().runs == 1 for state in states), 60)
    (release,), devices = release_status(config.state)
    assert (release.round, release.devices) == (1, None)
    assert all(device.answer == "taken" for device in devices)
    bundle = states[0] / "releases" / devices[0].report.bundle
    session = onnxruntime.InferenceSession(bundle / "predict.onnx")
    _, (x, y) = deployed_digits.split_digits()
    (logits,) = session.run(None, {session.get_inputs()[0].name: x})
    assert (np.argmax(logits, 1) == y).mean() > 0.9
