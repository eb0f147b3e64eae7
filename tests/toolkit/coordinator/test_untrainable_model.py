"""A model that most devices cannot train: the coordinator goes back, and leaves its cause out."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.formats.protocol.fleet import LEFT_OUT
from device_agent.formats.protocol.rounds import SubmodelFailure
from device_agent.formats.update import UpdateRecord, write_update
from toolkit.aggregation.limits.update_bounds import Scale
from toolkit.coordinator.rounds.round_state import Rounds
from toolkit.coordinator.server import Server
from vector_fleet import (
    CONFIG,
    SIZE,
    VectorModel,
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    send,
    task,
    trained,
)

LONG = CONFIG.replace("rounds = 3", "rounds = 5")
FALLBACK = LONG.replace('submodel = "full"', 'submodel = "full"\nfallback = "slice:0.2"')


class Bounded(VectorModel):
    """A vector whose updates have scales."""

    def scales(self, update: tuple[UpdateRecord, Mapping[str, np.ndarray]]) -> dict[str, Scale]:  # type: ignore[override]
        return {"w": Scale(float(update[1]["w"].max()), float(self.weights.max()))}


def send_all(links: Mapping[str, CoordinatorClient], folder: Path, **values: float) -> None:
    """Send the next update of each device; those named hold this value everywhere."""
    for name, link in links.items():
        work, record, update = trained(link, folder / name)
        if (value := values.get(name.replace("-", "_"))) is not None:
            shutil.rmtree(update)
            write_update(update, record, {"w": np.full(SIZE, value, np.float32)})
        send(link, work.round, update)


def diverge(link: CoordinatorClient, round_: int, submodel: str = "full") -> None:
    work = task(link)
    assert work.round == round_
    link.report(
        SubmodelFailure(
            submodel=submodel,
            failures=1,
            reason="The loss is not finite: training diverged.",
            round=round_,
            code="training.diverged",
        )
    )


def weights(server: Server) -> float:
    return float(server.coordinator.store.history.results()[-1].loss)


@pytest.mark.parametrize("text", [LONG, FALLBACK])
def test_the_round_starts_again_from_the_model_before_without_the_suspect(
    tmp_path: Path, text: str
) -> None:
    config, told = configured(tmp_path, text), list[str]()
    with running(config, Bounded(), told.append) as server:
        links = enrol(server, tmp_path)
        send_all(links, tmp_path / "1")
        send_all(
            links, tmp_path / "2", board_1=50.0
        )  # within the bounds, and far beyond the others
        assert task(links["board-1"]).round == 3
        diverge(links["desktop-1"], 3)
        assert server.coordinator.status().model_round == 2  # one alone is not believed
        diverge(links["desktop-2"], 3)
        assert_soon(lambda: server.coordinator.status().model_round == 1)
        works = {name: task(links[name]) for name in ("desktop-1", "desktop-2")}
        assert {work.round for work in works.values()} == {3}
        assert {work.submodel for work in works.values()} == {"full"}  # no fallback is kept
        assert links["board-1"].work().state == "wait"
        status = server.coordinator.status()
        (warning,) = status.warnings
        assert warning in told
        assert "model of round 1. The update of board-1 (machine 2) in round 2" in warning
        devices = {device.device: device for device in status.devices}
        assert devices["board-1"].state == LEFT_OUT
        assert "'w' contains numbers up to 50" in str(devices["board-1"].note)
    with running(config, Bounded()) as server:  # it all survives a restart
        devices = {device.device: device for device in server.coordinator.status().devices}
        assert devices["board-1"].state == LEFT_OUT
        assert server.coordinator.status().warnings == [warning]
        honest = {f"desktop-{n}": joined(server, tmp_path / str(n - 1)) for n in (1, 2)}
        send_all(honest, tmp_path / "3")
        assert task(honest["desktop-1"]).round == 4
        assert joined(server, tmp_path / "2").work().state == "wait"
        status = server.coordinator.status()
        assert (status.history[3].updates, status.warnings) == (2, [])
        # 1 after round 1, trained once more by the two that are left.
        assert status.history[3].loss == 2.0


def test_without_a_suspect_nobody_is_left_out_and_it_goes_back_step_by_step(tmp_path: Path) -> None:
    told = list[str]()
    with running(configured(tmp_path, LONG), Bounded(), told.append) as server:
        links = enrol(server, tmp_path)
        for number in (1, 2):
            send_all(links, tmp_path / str(number))
        for target in (1, 0):
            for name in ("desktop-1", "desktop-2"):
                diverge(links[name], 3)
            assert_soon(lambda to=target: server.coordinator.status().model_round == to)  # type: ignore[misc]
        assert {task(link).round for link in links.values()} == {3}
        diverge(links["board-1"], 3, "low-rank:0.5")
        diverge(links["desktop-1"], 3)
        assert_soon(lambda: "no earlier model" in server.coordinator.status().warnings[0])
        diverge(links["desktop-2"], 3)  # nobody is left: the round opens again
        assert server.coordinator.status().model_round == 0
        for _ in range(2):  # reports without end are one line a minute
            server.coordinator.store.suspicions.note_spoilt(-1, "")
            diverge(links["desktop-1"], 3)
            diverge(links["desktop-2"], 3)
            assert_soon(lambda: bool(server.coordinator.status().warnings))
            diverge(links["board-1"], 3, "low-rank:0.5")
        assert sum("There is no earlier model" in line for line in told) == 1
        send_all(links, tmp_path / "again")
        assert task(links["board-1"]).round == 4


@pytest.mark.parametrize(
    ("devices", "diverged", "sent", "suspect", "at_fault"),
    [
        (1, 1, 0, None, True),
        (2, 1, 0, None, False),  # the other one may be away
        (2, 1, 1, None, False),
        (2, 2, 0, None, True),
        (3, 1, 2, None, False),
        # Nobody else is waited for, and one update of three members may not become the model. Even
        # if the two fail for reasons of their own, the round would never close.
        (3, 2, 1, None, True),
        (5, 3, 2, None, False),
        (5, 3, 1, None, True),
        (6, 4, 1, None, True),
        (3, 2, 1, "last", True),  # the one that sends is suspected
        (3, 1, 1, "last", False),
        (10, 9, 1, None, True),
        (10, 5, 0, None, False),
        (10, 6, 0, None, True),
        (10, 7, 3, None, False),
        (10, 1, 9, "last", False),
    ],
)
def test_whose_fault_it_is(
    devices: int, diverged: int, sent: int, suspect: str | None, at_fault: bool
) -> None:
    machine = Rounds(1, devices, 60.0)
    names = [f"device-{number}" for number in range(devices)]
    for name in names:
        machine.enrol(name)
    machine.open(dict.fromkeys(names, "bundle"), 0.0)
    for name in names[:diverged]:
        machine.note_diverged(name)
        machine.excuse(name)
    for name in names[devices - sent :]:
        machine.take(name, 1, "bundle", name)
    assert machine.model_is_at_fault(names[-1] if suspect else None) == at_fault


def test_a_round_that_one_update_may_close_is_not_given_up() -> None:
    """With `min_updates = 1` the update of the third device becomes the model."""
    machine = Rounds(1, 3, 60.0, min_updates=1)
    names = ["first", "second", "third"]
    for name in names:
        machine.enrol(name)
    machine.open(dict.fromkeys(names, "bundle"), 0.0)
    for name in names[:2]:
        machine.note_diverged(name)
        machine.excuse(name)
    machine.take("third", 1, "bundle", "third")
    assert not machine.model_is_at_fault(None)
    assert machine.due(0.0)


def test_a_folded_round_says_nothing_of_its_own_model() -> None:
    """Most devices diverged, and the others were enough to close the round."""
    machine = Rounds(2, 5, 60.0)
    names = [f"device-{number}" for number in range(5)]
    for name in names:
        machine.enrol(name)
    machine.open(dict.fromkeys(names, "bundle"), 0.0)
    for name in names[:2]:
        machine.take(name, 1, "bundle", name)
    for name in names[2:]:
        machine.note_diverged(name)
        machine.excuse(name)
    assert not machine.model_is_at_fault(None)
    assert machine.due(0.0)
    machine.close()
    assert not machine.model_is_at_fault(None)
    machine.folded()
    assert not machine.model_is_at_fault(None)


def test_who_comes_back_first_does_not_speak_for_all() -> None:
    machine = Rounds(2, 3, 60.0)
    names = ["first", "second", "third"]
    for name in names:
        machine.enrol(name)
        machine.stop(name)
    machine.resume("first", None)
    machine.open({"first": "bundle"}, 0.0)
    for name in names[1:]:
        machine.resume(name, "bundle")
    machine.note_diverged("first")
    machine.excuse("first")
    assert not machine.model_is_at_fault(None)
    assert machine.needed == 2
    machine.excuse("second")
    assert machine.needed == 2  # as if all had been there at the opening
    machine.note_diverged("third")
    assert machine.model_is_at_fault(None)
