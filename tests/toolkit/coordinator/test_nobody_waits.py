"""While a round opens or closes, requests are answered."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from device_agent.federation.membership import join
from device_agent.formats.manifest import MANIFEST
from large_fleet import LargeFleet
from made_calibration import DEVICE
from profiles.documents.device_profile import DeviceProfile
from toolkit.coordinator.closing.round_aggregation import Update
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.storage import blobs
from toolkit.evaluation_sums import Evaluation
from vector_fleet import CONFIG, VectorModel, configured, enrol, running, token

WAIT_S = 20


class Blocked:
    """Stops whoever calls it until `go` is set."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.go.wait(WAIT_S)


class SlowModel(VectorModel):
    """Blocks in the method called `step`, once it is set."""

    step = ""

    def __init__(self, blocked: Blocked) -> None:
        super().__init__()
        self.blocked = blocked

    def _reach(self, step: str) -> None:
        if self.step == step:
            self.step = ""
            self.blocked()

    def fold_checked(self, updates: Iterator[Update], limits: object = None) -> None:  # type: ignore[override]
        self._reach("fold")
        super().fold_checked(updates, limits)

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> Evaluation:
        self._reach("evaluate")
        return super().evaluation(x, y)

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        self._reach("bundle")
        return super().bundle(submodel, round_)


@pytest.fixture
def blocked() -> Blocked:
    return Blocked()


@pytest.fixture
def fleet(tmp_path: Path, blocked: Blocked) -> Iterator[LargeFleet]:
    large = LargeFleet(tmp_path, 3, SlowModel(blocked))
    yield large
    large.store.close()


def requests(fleet: LargeFleet) -> str:
    """Poll, report a failed submodel's state, and ask for the status."""
    state = fleet.coordinator.work(fleet.device(0)).state
    assert len(fleet.coordinator.status().devices) == 3
    fleet.store.registry.count_bytes("desktop-1", fetched=1)  # what a download writes
    return state


def answered_while(fleet: LargeFleet, blocked: Blocked) -> list[str]:
    """What is answered while a turn of the round worker is blocked."""
    with ThreadPoolExecutor(2) as pool:
        turn = pool.submit(fleet.worker.turn)
        try:
            assert blocked.reached.wait(WAIT_S)
            answer = pool.submit(requests, fleet).result(WAIT_S / 4)
        finally:
            blocked.go.set()
        turn.result(WAIT_S)
    return [answer, fleet.coordinator.rounds.phase]


@pytest.mark.parametrize("step", ["fold", "evaluate"])
def test_while_a_round_closes(
    fleet: LargeFleet, blocked: Blocked, tmp_path: Path, step: str
) -> None:
    for number in range(3):
        fleet.send(number, fleet.update(tmp_path / str(number), number, 1.0))
    fleet.model.step = step  # type: ignore[attr-defined]
    assert answered_while(fleet, blocked) == ["wait", "aggregating"]


@pytest.mark.parametrize("what", ["the bundle is made", "its files are written", "it opens"])
def test_while_a_round_opens(
    fleet: LargeFleet,
    blocked: Blocked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    for number in range(3):
        fleet.send(number, fleet.update(tmp_path / str(number), number, 1.0))
    fleet.worker.turn()
    if what == "the bundle is made":
        fleet.model.step = "bundle"  # type: ignore[attr-defined]
    elif what == "its files are written":
        write = blobs.write_file

        def slow_write(path: Path, data: bytes) -> None:
            if not blocked.reached.is_set():
                blocked()
            write(path, data)

        monkeypatch.setattr(blobs, "write_file", slow_write)
    else:
        drop = fleet.store.drop_damaged

        def slow_drop(round_: int) -> list[str]:
            blocked()
            return drop(round_)

        monkeypatch.setattr(fleet.store, "drop_damaged", slow_drop)
    assert answered_while(fleet, blocked) == ["wait", "training"]
    assert MANIFEST in fleet.coordinator.bundles["full"]


def test_the_next_round_is_open_before_old_files_are_removed(
    fleet: LargeFleet, blocked: Blocked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        fleet.send(number, fleet.update(tmp_path / str(number), number, number**2 + 1.0))
    fleet.worker.turn()
    old = {sha256 for _, sha256, _ in fleet.store.updates(1)}
    remove = fleet.store.remove_unnamed

    def slow_remove() -> None:
        blocked()
        remove()

    monkeypatch.setattr(fleet.store, "remove_unnamed", slow_remove)
    assert answered_while(fleet, blocked) == ["train", "training"]
    assert old
    assert not old & set(fleet.store.blobs.names())


class SlowPlanner:
    """Blocks in every plan."""

    def __init__(self, blocked: Blocked) -> None:
        self.blocked = blocked

    def submodel(self, kind: DeviceKind, device: DeviceProfile) -> str:
        self.blocked()
        return "width:0.5"


def test_while_a_device_is_planned(tmp_path: Path, blocked: Blocked) -> None:
    kind = '[[devices]]\nname = "phone"\nsubmodel = "auto"\n'
    config = configured(tmp_path / "c", f"{CONFIG}\n{kind}")
    with running(config, planner=SlowPlanner(blocked)) as server, ThreadPoolExecutor(2) as pool:
        link = enrol(server, tmp_path)["board-1"]
        bearer, state = token(config, "phone"), tmp_path / "new"
        joining = pool.submit(join, server.url, bearer, "new", state, measure=lambda *_: DEVICE)
        try:
            assert blocked.reached.wait(WAIT_S)
            work = pool.submit(link.work).result(WAIT_S / 4)
        finally:
            blocked.go.set()
        assert (work.state, work.joined) == ("wait", 3)
        assert joining.result(WAIT_S).submodel == "width:0.5"
