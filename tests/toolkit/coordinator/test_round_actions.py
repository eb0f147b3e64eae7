"""The operator pauses and aborts rounds, drops an update, and goes back to an earlier model."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.formats.protocol.fleet import RoundResult
from killed_actions import Step, audit, kill_at_every_write
from operators import coordinator_of, enrolled, new_key, operator
from parameters import some_long
from refusals import refused
from toolkit.coordinator.closing.untrainable_model import go_back_as_wanted
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.operation.model_actions import WantedModel
from toolkit.coordinator.server import Server
from vector_fleet import (
    Fleet,
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    send_trained,
    task,
)

PAUSED = "rounds paused by the operator: the data are being cleaned"


def train(links: dict[str, CoordinatorClient], round_: int, folder: Path, *names: str) -> None:
    """Let these devices, by default all, train the open round and send their updates."""
    for name in names or links:
        send_trained(links[name], round_, folder / f"{name} {round_}")


def weight(server: Server) -> float:
    """The number of the global model's vector; each round adds 1 to that from which it starts."""
    weights: np.ndarray = server.round_worker._model.weights  # type: ignore[attr-defined]
    assert len(set(weights.tolist())) == 1
    return float(weights[0])


def test_no_round_opens_while_rounds_are_paused(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        links, actor = enrol(server, tmp_path), operator(server)
        assert task(links["board-1"]).round == 1
        actor.pause_rounds("the data are being cleaned")
        actor.pause_rounds("again")
        train(links, 1, tmp_path)  # the open round ends as usual
        assert_soon(lambda: len(actor.status().history) == 2)
        work = links["board-1"].work()
        assert (work.state, work.note) == ("wait", PAUSED)
    with running(config) as server:
        actor, board = operator(server), joined(server, tmp_path / "2")
        assert board.work().note == PAUSED
        assert any("paused by the operator" in warning for warning in actor.status().warnings)
        actor.resume_rounds("they are clean")
        actor.resume_rounds("again")
        assert task(board).round == 2
        assert actor.status().warnings == []
        assert [(entry.action, entry.target) for entry in actor.audit().entries] == [
            ("pause", "rounds"),
            ("resume", "rounds"),
        ]


def test_a_paused_device_is_told_why(new_fleet: Fleet) -> None:
    server, links = new_fleet
    assert task(links["board-1"]).note is None
    operator(server).act("pause", "board-1", "broken sensor")
    assert links["board-1"].work().note == "paused by the operator: broken sensor"


def test_an_aborted_round_opens_again_without_its_updates(new_fleet: Fleet, tmp_path: Path) -> None:
    server, links = new_fleet
    actor = operator(server)
    train(links, 1, tmp_path, "desktop-1", "desktop-2")
    with refused("operator.round-not-open"):
        actor.abort_round(2, "x")
    actor.abort_round(1, "wrong labels")
    assert server.coordinator.store.updates(1) == []
    assert task(links["desktop-1"]).round == 1  # it is asked again
    train(links, 1, tmp_path / "again")
    assert task(links["board-1"]).round == 2
    assert actor.status().history[-1].updates == 3
    assert [entry.action for entry in actor.audit().entries] == ["abort"]


def test_a_dropped_update_is_not_in_the_model(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        links, actor = enrol(server, tmp_path), operator(server)
        train(links, 1, tmp_path, "desktop-1")
        with refused("operator.no-update"):
            actor.drop_update(1, "board-1", "x")
        with refused("operator.unknown-device"):
            actor.drop_update(1, "board-7", "x")
        actor.drop_update(1, "desktop-1", "it holds the camera upside down")
        assert links["desktop-1"].work().state == "wait"
        assert actor.device("desktop-1").audit[0].action == "drop update of round 1"
    with running(config) as server:
        links = {name: joined(server, tmp_path / str(n)) for n, name in enumerate(links)}
        assert task(links["board-1"]).round == 1
        assert links["desktop-1"].work().state == "wait"  # also after a restart
        train(links, 1, tmp_path / "b", "desktop-2", "board-1")
        assert task(links["desktop-1"]).round == 2
        assert operator(server).status().history[-1].updates == 2


def test_going_back_drops_the_open_round_and_repeats_the_last(
    new_fleet: Fleet, tmp_path: Path
) -> None:
    server, links = new_fleet
    actor = operator(server)
    with refused("operator.no-earlier-model"):
        actor.go_back(None, "x")
    for round_ in (1, 2):
        train(links, round_, tmp_path)
        assert task(links["board-1"]).round == round_ + 1
    assert weight(server) == 2
    with refused("round.unknown"):
        actor.go_back(7, "x")
    train(links, 3, tmp_path, "desktop-1")
    assert actor.go_back(None, "round 2 was bad").round == 1
    assert task(links["desktop-1"]).round == 3
    assert (weight(server), actor.status().model_round) == (1, 1)
    assert server.coordinator.store.updates(3) == []
    assert actor.go_back(0, "all were bad").round == 0
    assert task(links["desktop-1"]).round == 3
    assert weight(server) == 0
    train(links, 3, tmp_path / "again")
    assert_soon(lambda: server.coordinator.status().state == "finished")
    assert weight(server) == 1
    with refused("operator.cannot-go-back"):
        actor.go_back(1, "x")
    assert [(e.action, e.target, e.reason) for e in actor.audit().entries] == [
        ("go back", "round 1", "round 2 was bad"),
        ("go back", "round 0", "all were bad"),
    ]


DEVICES = ("desktop-1", "desktop-2", "board-1")


def opened(coordinator: Coordinator) -> Coordinator:
    """The coordinator with round 2 open, and the updates that its store has."""
    if coordinator.rounds.phase == "aggregating":
        coordinator.rounds.open(dict.fromkeys(DEVICES, "bundle"), 1.0)
        for name, _, _ in coordinator.store.updates(2):
            coordinator.rounds.take(name, 2, "bundle", "update")
    return coordinator


def back(coordinator: Coordinator) -> None:
    action = Action("go back", "round 0", "operator", "x")
    opened(coordinator).wanted_model = WantedModel(0, action)
    assert go_back_as_wanted(coordinator)


STEPS: list[Step] = [
    lambda coordinator: coordinator.pause_rounds("x", "operator"),
    lambda coordinator: opened(coordinator).drop_update(2, "desktop-1", "x", "operator"),
    lambda coordinator: opened(coordinator).abort_round(2, "x", "operator"),
    lambda coordinator: coordinator.resume_rounds("x", "operator"),
    back,
]
LOG = [("pause", "rounds"), ("drop update of round 2", "desktop-1"), ("abort", "round 2")]
LOG += [("resume", "rounds"), ("go back", "round 0")]


def prepare(folder: Path) -> None:
    coordinator, store = coordinator_of(folder)
    for round_ in (0, 1):
        result = RoundResult(round=round_, accuracy=0.5, loss=1.0, updates=3)
        store.add_result(result, b"model of round %d" % round_)
    for kind in ("desktop", "desktop", "board"):
        enrolled(coordinator, store, kind, new_key())
    with store._database.transaction() as db:
        for device in DEVICES:
            row = (2, device, "0" * 64, b"{}", 1, 1, 1.0, 1.0)
            db.execute("INSERT INTO updates VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    store.close()


def check(folder: Path, done: int) -> None:
    log = audit(folder)
    assert log == LOG[: len(log)]
    assert len(log) >= done
    connection = sqlite3.connect(folder / "state" / "state.sqlite3")
    updates = {d for (d,) in connection.execute("SELECT device FROM updates WHERE round = 2")}
    rollbacks = connection.execute("SELECT * FROM rollbacks").fetchall()
    paused = connection.execute("SELECT 1 FROM meta WHERE key = 'rounds paused'").fetchall()
    connection.close()
    left = [set(DEVICES), set(DEVICES), set(DEVICES) - {"desktop-1"}, set(), set(), set()]
    assert updates == left[len(log)]
    assert len(paused) == (1 <= len(log) < 4)
    assert rollbacks == ([(1, 0)] if len(log) == 5 else [])


@pytest.mark.parametrize(
    ("before", "step"), some_long([(True, 3), (True, 1), (False, 1)], (True, 1), (False, 1))
)
def test_killed_at_every_write_rounds_agree_with_the_log(
    tmp_path: Path, before: bool, step: int, seed: int
) -> None:
    writes = kill_at_every_write(tmp_path, STEPS, prepare, check, before, seed % step + 1, step)
    assert writes > 2 * len(STEPS)
