"""What one device can make grow: nothing, however often it asks."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.formats.protocol.rounds import Progress, Stopped, SubmodelFailure
from log_messages import logged
from toolkit.coordinator.coordinator import Coordinator, restore
from toolkit.coordinator.database.device_registry import MOST_LEFT, Device
from toolkit.coordinator.minute_log import MOST, WINDOW_S, MinuteLog
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.database_check import check_database
from vector_fleet import CONFIG, MACHINE, configured

ONE = CONFIG[: CONFIG.rindex("[[devices]]")].replace("count = 2", "count = 1")
JOINS = 70
TOKEN = "token of the only place"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def coordinator(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Coordinator]:
    monkeypatch.setattr("os.fsync", lambda handle: None)  # hundreds of them take long
    config = configured(tmp_path, ONE)
    store = Store(config.state)
    store.registry.set_token("desktop", TOKEN, 1, 1)
    restored = restore(config, store, clock)
    restored.minute_log = MinuteLog(clock)
    yield restored
    store.close()


def joined(coordinator: Coordinator) -> Device:
    request = DeviceKey.new().join_request(TOKEN, "desk", MACHINE)
    return coordinator.authenticate(coordinator.join(TOKEN, request).secret)


def test_a_place_that_is_taken_and_left_again_and_again(
    coordinator: Coordinator, clock: Clock
) -> None:
    with logged("toolkit") as said:
        for _ in range(JOINS):
            coordinator.leave(joined(coordinator))
        clock.now += WINDOW_S
        coordinator.minute_log.flush()
    listed = [device.device for device in coordinator.status().devices]
    assert listed == [f"desktop-{n}" for n in range(JOINS - MOST_LEFT + 1, JOINS + 1)]
    assert coordinator.activity.keys() == set(listed)
    assert len(coordinator.store.registry._by_secret) == MOST_LEFT
    assert len(said) == MOST + 2
    assert said[-1] == f"{2 * JOINS - MOST - 1} more devices have joined or left."
    # After a restart too, and no id is given twice.
    coordinator.store.close()
    folder = coordinator.store.folder
    assert check_database(folder / "state.sqlite3") is not None
    connection = sqlite3.connect(folder / "state.sqlite3")
    assert connection.execute("SELECT count(*) FROM devices").fetchone() == (MOST_LEFT,)
    connection.close()
    again = restore(coordinator.config, Store(folder), clock)
    try:
        assert joined(again).id == f"desktop-{JOINS + 1}"
    finally:
        again.store.close()


def test_devices_that_sent_updates_stay_listed(coordinator: Coordinator) -> None:
    first = joined(coordinator)
    with coordinator.store._database.transaction() as db:
        db.execute("UPDATE devices SET past_updates = 1 WHERE id = ?", (first.id,))
    coordinator.leave(first)
    for _ in range(MOST_LEFT + 3):
        coordinator.leave(joined(coordinator))
    listed = [device.device for device in coordinator.status().devices]
    assert len(listed) == MOST_LEFT + 1
    assert listed[0] == first.id


def test_reports_without_end(coordinator: Coordinator, clock: Clock) -> None:
    """One line a minute for each kind of report, and how many more came; the last one is kept."""
    device = joined(coordinator)
    before = (coordinator.store.folder / "state.sqlite3").stat().st_size
    with logged("toolkit") as said:
        for number in range(300):
            reason = f"{number} {'x' * 10_000}"
            failure = SubmodelFailure(submodel="full", failures=3, reason=reason)
            coordinator.submodel_failed(device, failure)
            coordinator.stopped(device, Stopped(code="training.diverged", reason=reason))
            coordinator.work(device)
            coordinator.progress(device, Progress(state="paused", note=reason))
        clock.now += WINDOW_S
        coordinator.minute_log.flush()
    assert [line[:40] for line in said if "more" not in line] == [
        "desktop-1 (desk): full failed 3 times: 0",
        f"desktop-1 (desk) has stopped: 0 {'x' * 8}",
    ]
    assert sorted(line for line in said if "more" in line) == [
        "299 more reports of trouble from desktop-1 (full).",
        "desktop-1 has stopped 299 more times.",
    ]
    known = coordinator.store.registry.device(device.id)
    assert (known.trouble or "").startswith("full failed 3 times: 299 ")
    after = (coordinator.store.folder / "state.sqlite3").stat().st_size
    assert after - before <= 8192
    assert len(coordinator.activity[device.id].note or "") <= 200
