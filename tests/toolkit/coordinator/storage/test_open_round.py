"""What restarts do not change about the open round: its deadline and reported failures."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from device_agent.formats.protocol.rounds import SubmodelFailure
from toolkit.coordinator.closing.round_worker import RoundWorker
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.server import Server
from vector_fleet import CONFIG, VectorModel, configured, enrol, running, send_trained, task

DEADLINE = "deadline_s = 6\nmin_updates = 1\n[training]"


@dataclass
class Clock:
    """Seconds since 1970, and seconds since this machine started, which a restart sets back."""

    wall: float
    started: float

    def monotonic(self) -> float:
        return self.wall - self.started


@contextmanager
def restarted(folder: Path, clock: Clock) -> Iterator[tuple[Coordinator, RoundWorker]]:
    """A coordinator whose worker takes its steps when the test says so."""
    clock.started = clock.wall
    config = configured(folder, CONFIG.replace("[training]", DEADLINE))
    server = Server(config, VectorModel(), Path("fleet.toml"))
    server.coordinator.clock, server.coordinator.wall_clock = clock.monotonic, lambda: clock.wall
    worker = server.round_worker
    try:
        worker.resume()
        yield server.coordinator, worker
    finally:
        server.close()


def opened(folder: Path) -> None:
    """Round 1 has one update; it opens again at the next start."""
    with running(
        configured(folder, CONFIG.replace("[training]", DEADLINE.replace("6", "9999")))
    ) as server:
        links = enrol(server, folder)
        task(links["board-1"])
        send_trained(links["desktop-1"], 1, folder / "one")
        server.coordinator.store.open_round.end()


def test_restarts_within_the_deadline_close_the_round(tmp_path: Path) -> None:
    opened(tmp_path)
    clock = Clock(1e9, 0)
    rounds = []
    for _ in range(4):
        with restarted(tmp_path, clock) as (coordinator, worker):
            worker.turn()
            clock.wall += 4
            worker.turn()
            rounds.append(coordinator.rounds.done)
    assert rounds == [0, 1, 1, 1]  # closed 6 to 8 s after it opened; round 2 has no update


def test_a_clock_that_was_set_back_keeps_no_round_open(tmp_path: Path) -> None:
    opened(tmp_path)
    clock = Clock(1e9, 0)
    with restarted(tmp_path, clock) as (_, worker):
        worker.turn()
    clock.wall -= 1e6
    with restarted(tmp_path, clock) as (coordinator, worker):
        worker.turn()
        clock.wall += 6
        worker.turn()
        assert coordinator.rounds.done == 1


def test_reported_failures_survive(tmp_path: Path) -> None:
    opened(tmp_path)
    clock = Clock(1e9, 0)
    with restarted(tmp_path, clock) as (coordinator, worker):
        worker.turn()
        board = next(d for d in coordinator.store.registry.devices() if d.kind == "board")
        failure = SubmodelFailure(submodel="low-rank:0.5", failures=3, reason="no memory")
        coordinator.submodel_failed(board, failure)
        assert coordinator.rounds.task(board.id) == "wait"
    with restarted(tmp_path, clock) as (coordinator, worker):
        worker.turn()
        assert coordinator.rounds.task(board.id) == "wait"
        assert coordinator.rounds.task("desktop-2") == "train"
    with restarted(tmp_path, clock) as (coordinator, worker):
        worker.turn()
        for device in coordinator.store.registry.devices():
            if device.id == "desktop-2":
                coordinator.leave(device)
        worker.turn()
        assert coordinator.rounds.done == 1  # nobody else was waited for
        worker.turn()
        assert coordinator.rounds.task(board.id) == "train"  # a failure counts for one round


def test_a_round_that_nobody_is_left_in_opens_again_with_all_of_its_time(tmp_path: Path) -> None:
    opened(tmp_path)
    clock = Clock(1e9, 0)
    with restarted(tmp_path, clock) as (coordinator, worker):
        store = coordinator.store
        worker.turn()
        with store._database.transaction() as db:
            db.execute("DELETE FROM updates")
    with restarted(tmp_path, clock) as (coordinator, worker):
        worker.turn()
        clock.wall += 5
        for device in coordinator.store.registry.devices():
            submodel = coordinator.submodel(device)
            failure = SubmodelFailure(submodel=submodel, failures=3, reason="no memory")
            coordinator.submodel_failed(device, failure)
        worker.turn()
        assert coordinator.rounds.task("board-1") == "train"
        assert coordinator.rounds.remaining_s(clock.monotonic()) == 6
