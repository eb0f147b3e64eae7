"""Releases that fail or are interrupted on a device, which goes on with what it has."""

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from bundles import CLASSES, SAMPLE_SHAPE, once, rewrite, tiny_model
from device_agent.federation import release_folder
from device_agent.federation.release_folder import DeviceReleases
from device_agent.federation.releases import releases as module
from device_agent.federation.releases.releases import Releases
from device_agent.federation.training_attempts import MAX_FAILURES
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.protocol.releases import ReleaseOffer
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.inference.fine_tuning import FineTuned
from device_agent.inference.predictor import Predictor
from device_agent.inference.release_trial import TrialResult
from edgetailor import deploy
from killing import Job, die_at
from parameters import some_long
from profiles.errors import LimitError
from release_offers import (
    Files,
    Shelf,
    broken,
    bundles,
    device,
    offer,
    refuse,
    take,
    whole_release,
)


def too_large(*arguments: object) -> TrialResult:
    raise LimitError("Too much.", code="limit.memory")


def test_without_memory_a_release_is_tried_again_later(tmp_path: Path) -> None:
    shelf = Shelf()
    releases = device(tmp_path, shelf, too_large)
    for _ in range(3):
        releases.follow(offer(1))
    assert (len(shelf.fetched), len(shelf.reports), bundles(tmp_path)) == (2, 1, 0)
    assert (shelf.reports[0].code, shelf.reports[0].runs) == ("limit.memory", 0)
    device(tmp_path, shelf).follow(offer(1))
    assert whole_release(tmp_path) == 1


def test_a_full_disk_refuses_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    device(tmp_path, shelf).follow(offer(1))
    with monkeypatch.context() as patch:
        patch.setattr(module, "room", lambda folder: 10)
        device(tmp_path, shelf).follow(offer(2))
    assert (whole_release(tmp_path), bundles(tmp_path), len(shelf.fetched)) == (1, 1, 2)
    assert shelf.reports[-1].code == "release.no-room"

    def fill(given: FileOffer, to: Path, patience_s: float) -> None:
        to.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device", str(to))

    monkeypatch.setattr(shelf, "download", fill)
    device(tmp_path, shelf).follow(offer(2))
    assert (whole_release(tmp_path), bundles(tmp_path)) == (1, 1)
    assert shelf.reports[-1].code == "storage.disk-error"
    assert str(tmp_path) not in shelf.reports[-1].reason


@pytest.mark.parametrize("name", [MANIFEST, "predict.onnx"])
def test_a_damaged_release_is_repaired_at_the_next_start(tmp_path: Path, name: str) -> None:
    device(tmp_path).follow(offer(1))
    (next((tmp_path / "releases").iterdir()) / name).write_bytes(b"damaged")
    device(tmp_path).follow(offer(1))
    assert whole_release(tmp_path) == 1


def test_a_lost_pointer_needs_no_download(tmp_path: Path) -> None:
    shelf = Shelf()
    device(tmp_path, shelf).follow(offer(1))
    (tmp_path / "release.json").write_bytes(b"{damaged")
    device(tmp_path, shelf).follow(offer(1))
    assert (whole_release(tmp_path), len(shelf.fetched)) == (1, 2)


def run(releases: Releases, given: ReleaseOffer, job: Job) -> int:
    """Follow an offer in a forked process that `job` kills at one of its writes."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_at(job)
            releases.follow(given)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die(*arguments: object) -> Any:
    """What the system does to an agent that uses too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("tunes", [False, True])
def test_an_agent_that_a_release_kills_goes_on_without_it(tmp_path: Path, tunes: bool) -> None:
    shelf, given = Shelf(), offer(2, fine_tune=5 if tunes else 0)

    def started() -> Releases:
        return device(tmp_path, shelf, take if tunes else die, die if tunes else None)

    device(tmp_path, shelf).follow(offer(1))
    for _ in range(MAX_FAILURES):
        assert run(started(), given, Job("", "", "", stop=10**6)) == -signal.SIGKILL
    for _ in range(2):  # at later starts, too
        releases = started()
        releases.follow(given)
        releases.follow(given)
    report = shelf.reports[-1]
    if tunes:
        assert (whole_release(tmp_path), report.taken, report.runs_fine_tuned) == (2, True, False)
    else:
        assert (whole_release(tmp_path), report.number, report.code) == (1, 2, "release.killed")
    device(tmp_path, shelf).follow(offer(3))
    assert whole_release(tmp_path) == 3


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
def test_a_failed_fine_tuning_does_not_say_that_the_release_was_not_taken(
    tmp_path: Path, error: Exception
) -> None:
    tune, shelf = Mock(side_effect=error), Shelf()
    releases = device(tmp_path, shelf, tune=tune)
    for _ in range(3):
        releases.follow(offer(1, fine_tune=5))
    assert tune.call_count == 1
    assert all(report.taken for report in shelf.reports)


def test_a_folder_that_cannot_be_written_stops_no_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf()
    shelf.answers = False
    releases = device(tmp_path, shelf)
    releases.follow(offer(1))
    shelf.answers = True
    with monkeypatch.context() as patch:
        error = OSError(errno.EROFS, "Read-only file system")
        patch.setattr(release_folder, "write_file", Mock(side_effect=error))
        for _ in range(2):
            releases.follow(offer(1))
        assert [report.number for report in shelf.reports] == [1]
        device(tmp_path, shelf, broken).follow(offer(2))
    assert whole_release(tmp_path) == 1
    device(tmp_path, shelf).follow(offer(2))
    assert whole_release(tmp_path) == 2


def test_what_a_stranger_left_in_the_folder_stops_no_rounds(tmp_path: Path) -> None:
    device(tmp_path).follow(offer(1))
    (tmp_path / "releases" / "stray").write_text("stray")
    device(tmp_path).follow(offer(2))
    shutil.rmtree(tmp_path / "releases")
    (tmp_path / "releases").write_text("stray")
    shelf = Shelf()
    device(tmp_path, shelf).follow(offer(3))
    assert shelf.reports[-1].code == "storage.unusable-releases"


def write_constants(folder: Path) -> None:
    """Inference bundles of models that always predict the class of their folder's name."""
    model, _ = tiny_model()
    deploy(model, "full", SAMPLE_SHAPE, folder / "any")
    graph = onnx.load(folder / "any" / "predict.onnx")
    (bias,) = [t for t in graph.graph.initializer if list(t.dims) == [CLASSES]]
    for number in range(CLASSES):
        shutil.copytree(folder / "any", folder / str(number))
        biased = onnx.numpy_helper.from_array(1e4 * np.eye(CLASSES, dtype=np.float32)[number])
        biased.name = bias.name
        bias.CopyFrom(biased)
        onnx.save(graph, folder / str(number) / "predict.onnx")
        rewrite(folder / str(number), lambda manifest: None)


@pytest.fixture(scope="module")
def constants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "constant-releases", write_constants)


TUNED = 7
"""The model that a fine-tuning gives."""


# A kill behind a write is one before the next but for what is not flushed between them.
@pytest.mark.parametrize("before", some_long([True, False], False))
@pytest.mark.parametrize(
    ("number", "options", "trial", "after"),
    [
        (3, {}, take, 3),
        (3, {}, refuse, 2),
        (1, {"back": True, "issued": 200}, take, 1),
        (0, {"back": True, "issued": 200}, take, 0),
        (3, {"fine_tune": 5}, take, TUNED),
    ],
)
def test_killed_at_any_write_of_a_switch_a_device_predicts(
    tmp_path: Path,
    constants: Path,
    number: int,
    options: dict[str, Any],
    trial: Any,
    after: int,
    before: bool,
) -> None:
    def files(number: int) -> Files:
        folder = constants / str(number % CLASSES)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def predicted(state: Path) -> int:
        """The class that the device predicts, as `edgetailor-agent predict` would."""
        predictor = Predictor(DeviceReleases(state).current() or state / "bundle", threads=1)
        (probabilities,) = predictor.predict(np.zeros((1, *SAMPLE_SHAPE), np.float32))
        return int(probabilities.argmax())

    def ready(state: Path) -> Releases:
        def tune(*arguments: object) -> FineTuned:
            scratch = DeviceReleases(state).scratch
            shutil.copytree(constants / str(TUNED), scratch / "bundle", dirs_exist_ok=True)
            return FineTuned(scratch / "bundle")

        return device(state, shelf, trial, tune)

    shelf = Shelf(files)
    shutil.copytree(constants / "0", tmp_path / "start" / "bundle")
    for earlier in (1, 2):
        device(tmp_path / "start", shelf).follow(offer(earlier, content=files))
    given = offer(number, content=files, **options)
    write, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        write += 1
        state = tmp_path / str(write)
        shutil.copytree(tmp_path / "start", state)
        code = run(ready(state), given, Job("", "", "", stop=write, before=before))
        assert code in (0, -signal.SIGKILL)
        assert predicted(state) in {2, after} | ({number} if after == TUNED else set())
        ready(state).follow(given)
        assert predicted(state) == after
        assert bundles(state) <= 3
    assert write > 5
