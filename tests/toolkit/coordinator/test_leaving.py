"""Leaving over real sockets: both sides afterwards, other coordinators and other kinds."""

from pathlib import Path

import pytest

from bundles import everything
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import membership, round_loop
from device_agent.federation.membership import join, leave
from device_agent.federation.run_options import RunOptions
from device_agent.formats.protocol.problems import NOT_AUTHORISED
from log_messages import logged
from refusals import refused as raises_code
from toolkit.coordinator.server import Server
from vector_fleet import (
    Fleet,
    configured,
    running,
    send,
    send_trained,
    task,
    token,
    trained,
)


def test_leaving_cleans_both_sides(fleet: Fleet, tmp_path: Path) -> None:
    server, links = fleet
    state = server.config.state.parent / "2"
    board = links["board-1"]
    work, _, update = trained(board, tmp_path / "late")
    assert leave(state).device == "board-1"
    assert not state.exists()
    with raises_code(NOT_AUTHORISED) as caught:
        send(board, work.round, update)
    assert "board-1 has left this federation" in str(caught.value)
    for name in ("desktop-1", "desktop-2"):
        send_trained(links[name], 1, tmp_path / name)
    assert task(links["desktop-1"]).round == 2  # nobody waited for it
    new = join(server.url, token(server.config, "board"), "next", tmp_path / "new")
    assert new.device == "board-2"
    assert CoordinatorClient(server.url, new.secret).work().state == "wait"  # until the next round
    states = {d.device: d.state for d in server.coordinator.status().devices}
    assert (states["board-1"], states["board-2"]) == ("left", "waiting")
    for name in ("desktop-1", "desktop-2"):
        send_trained(links[name], 2, tmp_path / f"{name}-2")
    assert task(CoordinatorClient(server.url, new.secret)).round == 3


def test_leaving_without_the_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LEAVE_PATIENCE_S", 0.5)
    config = configured(tmp_path / "c")
    with running(config) as server:
        join(server.url, token(config, "board"), "desk", tmp_path / "a")
    (tmp_path / "a" / "personal.safetensors").write_bytes(b"mine")
    (tmp_path / "a" / "notes.txt").write_text("the owner's")
    before = everything(tmp_path / "a")
    with raises_code("client.not-left", device="board-1") as caught:
        leave(tmp_path / "a")
    assert "Nothing was removed." in str(caught.value)
    assert everything(tmp_path / "a") == before
    leave(tmp_path / "a", keep_personal=True, offline=True)
    assert set(everything(tmp_path / "a")) == {"notes.txt", "personal.safetensors"}
    with raises_code("state.not-joined", path=str(tmp_path / "a")):
        leave(tmp_path / "a")


def test_a_folder_that_cannot_be_written_stays_a_members(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "a"
    join(server.url, token(server.config, "board"), "desk", state)
    # As on a read-only disk; root may write into folders of any mode.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != state)
    options = RunOptions(data=str(server.config.held_out), state=state)
    for call in (lambda: leave(state), lambda: round_loop.run(options)):
        with raises_code("state.not-writable", path=str(state)) as caught:
            call()
        assert "Nothing was changed." in str(caught.value)
    assert [d.state for d in server.coordinator.status().devices] == ["enrolled"]
    assert set(everything(state)) == {"device.json", "device.key"}


def test_replacing_a_coordinator(server: Server, tmp_path: Path) -> None:
    state = tmp_path / "a"
    join(server.url, token(server.config, "board"), "desk", state)
    old_key = (state / "device.key").read_bytes()
    (state / "personal.safetensors").write_bytes(b"of the old federation")
    config = configured(tmp_path / "second")
    with running(config) as second:
        before = everything(state)
        with raises_code("join.unknown-token"):
            join(second.url, "guess", "desk", state, replace=True)
        assert everything(state) == before
        with logged() as said:
            moved = join(second.url, token(config, "desktop"), "desk", state, replace=True)
        assert (moved.url, moved.device) == (second.url, "desktop-1")
        assert said[2] == f"Joined {second.url} as desktop-1 (desk); it trains full."
    assert set(everything(state)) == {"device.json", "device.key"}
    assert (state / "device.key").read_bytes() != old_key
    assert [d.state for d in server.coordinator.status().devices] == ["left"]


def test_replacing_a_coordinator_that_is_gone(
    server: Server, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "LEAVE_PATIENCE_S", 0.5)
    config = configured(tmp_path / "second")
    with running(config) as second:
        join(second.url, token(config, "board"), "desk", tmp_path / "a")
    join(server.url, token(server.config, "board"), "x", tmp_path / "a", replace=True)
    assert "The old coordinator was not told that board-1 has left: " in "".join(said)


def test_another_kind_of_the_same_coordinator(server: Server, tmp_path: Path) -> None:
    join(server.url, token(server.config, "board"), "desk", tmp_path / "a")
    other = token(server.config, "desktop")
    (tmp_path / "a" / "device.json").unlink()
    with raises_code("join.other-kind") as caught:
        join(server.url, other, "desk", tmp_path / "a")
    assert "this device has already joined as board-1" in str(caught.value)
    join(server.url, token(server.config, "board"), "desk", tmp_path / "a")
    moved = join(server.url, other, "desk", tmp_path / "a", replace=True)
    assert moved.device == "desktop-1"
    states = {d.device: d.state for d in server.coordinator.status().devices}
    assert states == {"board-1": "left", "desktop-1": "enrolled"}


def test_a_restart_knows_who_left(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        links = {}
        for number, kind in enumerate(["desktop", "desktop", "board"]):
            identity = join(server.url, token(config, kind), kind, tmp_path / str(number))
            links[identity.device] = identity.secret
        task(CoordinatorClient(server.url, links["board-1"]))
        leave(tmp_path / "2")
    with running(config) as server:
        assert task(CoordinatorClient(server.url, links["desktop-1"])).round == 1
        assert server.coordinator.status().state == "training"
