"""What requests cost in a federation of many devices, counted in work and never in time."""

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from device_agent.formats.manifest import WEIGHTS
from device_agent.formats.protocol.rounds import Progress
from large_fleet import LargeFleet
from toolkit.coordinator import coordinator
from toolkit.coordinator.coordinator import Coordinator

FEW, MANY = 20, 400


@dataclass
class Work:
    """What a call did.

    Attributes:
        steps: Instructions of SQLite's machine; a scan of a table takes some for each row.
        calls: Calls of Python and C functions.
        listed: Folders that were listed.
        allocated: Most bytes that were allocated at a time.
    """

    steps: int = 0
    calls: int = 0
    listed: list[str] = field(default_factory=list)
    allocated: int = 0


_now: Work | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _now is not None and event in ("os.listdir", "os.scandir"):
        _now.listed.append(str(arguments[0]))


sys.addaudithook(_audit)


@contextmanager
def counting(fleet: LargeFleet) -> Iterator[Work]:
    global _now
    work = _now = Work()

    def step() -> None:
        work.steps += 1

    def called(*about: object) -> None:
        if about[1] in ("call", "c_call"):
            work.calls += 1

    fleet.connection.set_progress_handler(step, 1)
    gc.disable()  # a collection would be counted wherever it happens
    tracemalloc.start()
    sys.setprofile(called)
    try:
        yield work
    finally:
        sys.setprofile(None)
        work.allocated = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        gc.enable()
        fleet.connection.set_progress_handler(None, 0)
        _now = None


def poll(fleet: LargeFleet, number: int) -> None:
    fleet.coordinator.work(fleet.device(number))


def download(fleet: LargeFleet, number: int) -> None:
    sha256 = fleet.coordinator.bundles["full"][WEIGHTS].sha256
    fleet.coordinator.file(fleet.device(number), sha256)


def report(fleet: LargeFleet, number: int) -> None:
    fleet.coordinator.progress(fleet.device(number), Progress(state="training", loss=1.0))


def upload(fleet: LargeFleet, number: int) -> None:
    """The tensors twice, because the second file replaces the first; then what they are."""
    fleet.send_tensors(number, b"broken")
    fleet.send(number, fleet.config.state.parent / f"update {number}" / "update")


def turn(fleet: LargeFleet, number: int) -> None:
    fleet.worker.turn()


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LargeFleet]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)  # thousands of them take a minute
        yield from filled(tmp_path_factory)


def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LargeFleet]]:
    fleets = []
    for devices in (FEW, MANY):
        folder = tmp_path_factory.mktemp(f"fleet{devices}")
        fleet = LargeFleet(folder, devices)
        for number in range(devices - 3):  # devices that are done make the tables large
            fleet.update(folder / f"update {number}", number, number)
            upload(fleet, number)
        fleets.append(fleet)
    yield fleets
    for fleet in fleets:
        fleet.store.close()


@pytest.mark.parametrize("request_", [poll, download, report, upload, turn])
def test_a_request_costs_the_same_with_twenty_times_the_devices(
    fleets: list[LargeFleet], request_: Callable[[LargeFleet, int], None]
) -> None:
    works = []
    for fleet in fleets:
        last = len(fleet.secrets) - 2  # of the kind `desktop`
        if request_ is upload:
            fleet.update(fleet.config.state.parent / f"update {last}", last, last)
        fleet.coordinator.work(fleet.device(last - 1))  # imports and caches what it needs
        with counting(fleet) as work:
            request_(fleet, last if request_ is upload else last - 1)
        works.append(work)
    few, many = works
    assert few.listed == many.listed == []
    assert many.steps == few.steps
    assert few.calls <= many.calls <= few.calls + 5
    assert many.allocated <= few.allocated + 4000


@pytest.mark.parametrize(
    "look",
    [
        lambda coordinator: coordinator.overview(),
        lambda coordinator: coordinator.status(),
        lambda coordinator: coordinator.device_page(3, 10),
        lambda coordinator: coordinator.device_page(3, 10, sort="seen", descending=True),
    ],
    ids=["overview", "status", "page", "sorted page"],
)
def test_what_the_operator_sees_does_not_grow_with_the_devices(
    fleets: list[LargeFleet],
    look: Callable[[Coordinator], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some references to each device and a key to sort by are allowed, but no description of it."""
    monkeypatch.setattr(coordinator, "MOST_LISTED", 10)
    works = []
    for fleet in fleets:
        look(fleet.coordinator)  # caches
        with counting(fleet) as work:
            look(fleet.coordinator)
        works.append(work)
    few, many = works
    assert many.allocated - few.allocated <= 200 * (MANY - FEW)
    assert few.allocated > 2000


def test_files_are_dropped_by_name(tmp_path: Path) -> None:
    """The last upload of each device stays, and a bundle's file that a device sends itself."""
    fleet = LargeFleet(tmp_path, 3)
    blobs = fleet.store.blobs
    before = set(blobs.names())
    for number, data in ((0, b"a"), (0, b"b"), (1, b"b"), (0, b"c"), (0, b"c")):
        fleet.send_tensors(number, data)
    kept = set(blobs.names())
    assert {blobs.path(name).read_bytes() for name in kept - before} == {b"b", b"c"}
    weights = blobs.path(fleet.coordinator.bundles["full"][WEIGHTS].sha256)
    fleet.send_tensors(0, weights.read_bytes())
    fleet.send_tensors(0, b"c")
    assert set(blobs.names()) == kept
    fleet.store.close()
