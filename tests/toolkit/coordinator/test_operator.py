"""The operator's actions on devices and rounds, over HTTP and after restarts."""

import time
from pathlib import Path
from typing import get_args

import pytest
import urllib3

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import membership
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.formats.protocol.problems import NOT_AUTHORISED
from device_agent.formats.protocol.rounds import Progress, Stopped
from operators import coordinator_of, enrolled, new_key, operator
from refusals import refused
from toolkit.coordinator.database.device_registry import MOST_LEFT
from toolkit.coordinator.operation.messages import Action
from vector_fleet import (
    MACHINE,
    Fleet,
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    send,
    send_trained,
    task,
    token,
    trained,
)


def test_a_paused_device_gets_no_work_until_it_is_resumed(new_fleet: Fleet, tmp_path: Path) -> None:
    server, links = new_fleet
    actor = operator(server)
    board = links["board-1"]
    work, _, update = trained(board, tmp_path / "early")
    detail = actor.act("pause", "board-1", "broken sensor")
    assert (detail.device.state, detail.device.decision) == ("paused", "paused")
    assert board.work().state == "wait"
    with refused("round.closed"):
        send(board, work.round, update)
    for name in ("desktop-1", "desktop-2"):
        send_trained(links[name], 1, tmp_path / name)
    assert task(links["desktop-1"]).round == 2  # nobody waited for the board
    assert board.work().state == "wait"
    shown = actor.device("board-1")
    assert shown.device.note == "paused by the operator: broken sensor"
    assert actor.act("resume", "board-1", "repaired").device.decision is None
    assert task(board).round == 2  # also in the open round
    for name, link in links.items():
        send_trained(link, 2, tmp_path / f"{name}-2")
    assert task(board).round == 3
    detail = actor.device("board-1")
    assert [(update.round, update.samples) for update in detail.updates] == [(2, 10)]
    assert detail.machine["architecture"]


def test_an_update_that_came_before_the_pause_counts(new_fleet: Fleet, tmp_path: Path) -> None:
    server, links = new_fleet
    send_trained(links["board-1"], 1, tmp_path / "board")
    operator(server).act("pause", "board-1", "its owner asked")
    for name in ("desktop-1", "desktop-2"):
        send_trained(links[name], 1, tmp_path / name)
    task(links["desktop-1"])
    assert server.coordinator.status().history[-1].updates == 3


def test_removed_banned_and_let_in_again(new_fleet: Fleet, tmp_path: Path) -> None:
    server, links = new_fleet
    actor = operator(server)
    board = links["board-1"]
    actor.act("remove", "board-1", "sold")
    with refused(NOT_AUTHORISED) as caught:
        board.work()
    assert str(caught.value).startswith("board-1 was removed by the operator: sold.")
    detail = actor.act("let-in", "board-1", "bought back")
    assert (detail.device.state, detail.device.decision) == ("enrolled", None)
    assert board.work().state in ("wait", "train")  # its secret is valid again

    actor.act("ban", "board-1", "sends noise")
    state = server.config.state.parent / "2"
    with refused("join.banned", "banned by the operator: sends noise"):
        membership.join(server.url, token(server.config, "board"), "x", state, replace=True)
    # Its place is free: another device takes it.
    new = membership.join(server.url, token(server.config, "board"), "next", tmp_path / "new")
    assert new.device == "board-2"
    assert actor.act("let-in", "board-1", "it was another").device.state == "left"  # no place
    assert [entry.action for entry in actor.device("board-1").audit] == [
        *("let-in", "ban", "let-in", "remove"),
    ]
    actor.act("remove", "board-2", "make room")
    links = {"board-1": membership.join(
        server.url, token(server.config, "board"), "x", state, replace=True
    )}  # fmt: skip
    assert links["board-1"].device == "board-3"  # no longer banned; a new device


def test_repeating_an_action_changes_nothing(new_fleet: Fleet) -> None:
    server, _ = new_fleet
    actor = operator(server)
    for name in get_args(Action):
        first = actor.act(name, "desktop-1", f"{name} it")
        entries = actor.audit().entries
        again = actor.act(name, "desktop-1", "again")
        assert actor.audit().entries == entries
        assert again.device.decision == first.device.decision
    assert [(e.number, e.who, e.action, e.reason) for e in actor.audit().entries] == [
        (1, "operator", "pause", "pause it"),
        (2, "operator", "resume", "resume it"),
        (3, "operator", "remove", "remove it"),
        (4, "operator", "ban", "ban it"),
        (5, "operator", "let-in", "let-in it"),
    ]
    assert [entry.number for entry in actor.audit(after=3, most=1).entries] == [4]
    assert actor.audit(after=3, most=1).last == 5


UNKNOWN = (
    "This federation has no device 'bord-1': did you mean 'board-1'? `edgetailor devices` lists "
    "all."
)


def test_what_cannot_be_done_is_refused_and_leaves_no_entry(new_fleet: Fleet) -> None:
    server, links = new_fleet
    actor = operator(server)
    with refused("operator.unknown-device", answer=UNKNOWN):
        actor.act("pause", "bord-1", "x")
    links["board-1"].leave()
    for name in ("pause", "resume"):
        with refused("operator.not-a-member"):
            actor.act(name, "board-1", "x")
    url = f"{server.url}/v1/operator/devices/desktop-1/pause"
    headers = {"Authorization": f"Bearer {server.coordinator.operator_token}"}
    for reason in ("", "x" * 201, 7, "a\nb", "\x1b[31mred", "\x9b31m"):
        answer = urllib3.request("POST", url, json={"reason": reason}, headers=headers)
        assert (answer.status, answer.json()["code"]) == (422, "client.bad-request")
    answer = urllib3.request("POST", f"{url}d", json={"reason": "x"}, headers=headers)
    assert (answer.status, answer.json()["code"]) == (422, "client.bad-request")
    assert actor.audit().entries == []


def test_the_open_round_closes_with_the_updates_that_have_come(
    new_fleet: Fleet, tmp_path: Path
) -> None:
    server, links = new_fleet
    actor = operator(server)
    assert task(links["board-1"]).round == 1
    with refused("operator.too-few-updates", "Round 1 has 0 updates, and needs 2"):
        actor.close_round(1, "nobody comes")
    for name in ("desktop-1", "desktop-2"):
        send_trained(links[name], 1, tmp_path / name)
    with refused("operator.round-not-open"):
        actor.close_round(2, "too early")
    actor.close_round(1, "the board is at home")
    assert task(links["desktop-1"]).round == 2
    assert server.coordinator.status().history[-1].updates == 2
    note = actor.device("board-1").device.note
    assert note == "round 1 closed before its update came"
    assert [(entry.action, entry.target) for entry in actor.audit().entries] == [
        ("close", "round 1")
    ]


def test_a_moved_deadline_holds_after_a_restart(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        links = enrol(server, tmp_path)
        for name in ("desktop-1", "desktop-2"):
            send_trained(links[name], 1, tmp_path / name)
        actor = operator(server)
        for wrong in (-1.0, 1e9, float("nan")):
            with refused("client.bad-request"):
                actor.end_round_after(1, wrong, "x")
        actor.end_round_after(1, 20 * 86400, "holidays")
        with server.coordinator.lock:
            remaining = server.coordinator.rounds.remaining_s(server.coordinator.clock())
        assert 19 * 86400 < remaining <= 20 * 86400
    with running(config) as server:
        board = joined(server, tmp_path / "2")
        assert task(board).round == 1
        with server.coordinator.lock:
            remaining = server.coordinator.rounds.remaining_s(server.coordinator.clock())
        assert 19 * 86400 < remaining <= 20 * 86400
        operator(server).end_round_after(1, 0, "back")  # it has two of three updates
        assert_soon(lambda: board.work().round == 2)


def test_devices_are_listed_in_parts(new_fleet: Fleet) -> None:
    server, _ = new_fleet
    actor = operator(server)
    actor.act("pause", "desktop-2", "x")
    whole = actor.devices()
    assert [d.device for d in whole.devices] == ["desktop-1", "desktop-2", "board-1"]
    assert (whole.total, sum(whole.states.values()), whole.states["paused"]) == (3, 3, 1)
    assert [d.device for d in actor.devices(start=1, most=1).devices] == ["desktop-2"]
    assert [d.device for d in actor.devices(kind="board").devices] == ["board-1"]
    assert [d.device for d in actor.devices(state="paused").devices] == ["desktop-2"]
    assert [d.device for d in actor.devices(search="MACHINE 2").devices] == ["board-1"]
    assert actor.devices(search="none").total == 0
    backwards = actor.devices(sort="name", descending=True)
    assert [d.name for d in backwards.devices] == ["machine 2", "machine 1", "machine 0"]


def secret_of(link: CoordinatorClient) -> str:
    return str(link._pool.headers["Authorization"]).removeprefix("Bearer ")


def test_a_restart_knows_every_decision(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        states = {}
        for number, kind in enumerate(["desktop", "desktop", "board"]):
            state = tmp_path / str(number)
            states[membership.join(server.url, token(config, kind), "m", state).device] = state
        actor = operator(server)
        actor.act("pause", "desktop-1", "slow")
        actor.act("remove", "desktop-2", "sold")
        actor.act("ban", "board-1", "noise")
        entries = actor.audit().entries
    with running(config) as server:
        actor = operator(server)
        assert actor.audit().entries == entries
        shown = {d.device: (d.state, d.decision, d.note) for d in actor.devices().devices}
        assert shown == {
            "desktop-1": ("paused", "paused", "paused by the operator: slow"),
            "desktop-2": ("left", "removed", "removed by the operator: sold"),
            "board-1": ("left", "banned", "banned by the operator: noise"),
        }
        assert joined(server, states["desktop-1"]).work().state == "wait"
        with refused(NOT_AUTHORISED):
            joined(server, states["desktop-2"]).work()
        key = DeviceKey.from_pem((states["board-1"] / "device.key").read_bytes(), "device.key")
        stranger = CoordinatorClient(server.url, token(config, "board"), patience_s=0)
        with refused("join.banned"):
            stranger.join(lambda: key.join_request(token(config, "board"), "m", MACHINE))


def test_the_update_of_a_removed_device_counts_over_a_restart(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        links = enrol(server, tmp_path)
        send_trained(links["desktop-1"], 1, tmp_path / "d")
        operator(server).act("remove", "desktop-1", "sold")
    with running(config) as server:
        board, second = joined(server, tmp_path / "2"), joined(server, tmp_path / "1")
        assert task(board).round == 1
        assert server.coordinator.rounds.updates.keys() == {"desktop-1"}
        for name, link in (("b", board), ("e", second)):
            send_trained(link, 1, tmp_path / name)
        assert task(board).round == 2
        assert server.coordinator.status().history[-1].updates == 3


def test_a_ban_is_for_the_key_under_whatever_name_it_joined(tmp_path: Path) -> None:
    coordinator, store = coordinator_of(tmp_path)
    key = new_key()
    enrolled(coordinator, store, "board", key)
    coordinator.act("remove", "board-1", "sold", "operator")
    assert enrolled(coordinator, store, "board", key).id == "board-2"
    coordinator.act("ban", "board-1", "noise", "operator")
    assert store.registry.device("board-2").has_left
    assert set(store.operator_log.banned(key)) == {"board-1", "board-2"}
    coordinator.act("let-in", "board-2", "it was another", "operator")
    assert store.operator_log.banned(key) == {}
    assert not store.registry.device("board-2").has_left
    store.close()


def test_who_left_by_itself_is_not_let_in_as_a_member(tmp_path: Path) -> None:
    coordinator, store = coordinator_of(tmp_path)
    coordinator.leave(enrolled(coordinator, store, "board", new_key()))
    coordinator.act("ban", "board-1", "noise", "operator")
    coordinator.act("let-in", "board-1", "it was another", "operator")
    assert store.registry.device("board-1").has_left
    assert store.operator_log.decisions == {}
    store.close()


def test_a_paused_device_keeps_its_place_until_it_leaves(tmp_path: Path) -> None:
    coordinator, store = coordinator_of(tmp_path)
    coordinator.config = coordinator.config.model_copy(update={"forget_after": 10.0})
    first, second = (enrolled(coordinator, store, "desktop", new_key()) for _ in range(2))
    coordinator.act("pause", first.id, "holidays", "operator")
    coordinator.clock = lambda: 100.0
    coordinator.forget_absent()
    assert not store.registry.device(first.id).has_left
    assert store.registry.device(second.id).forgotten
    coordinator.progress(first, Progress(state="training", note="round 1"))
    shown = coordinator.device_detail(first.id).device
    assert (shown.state, shown.note) == ("paused", "paused by the operator: holidays")
    coordinator.leave(first)
    assert store.operator_log.decisions == {}
    store.close()
    coordinator, store = coordinator_of(tmp_path)
    assert coordinator.device_detail(first.id).device.state == "left"
    store.close()


def test_a_stopped_device_is_shown_as_stopped_after_a_pause(tmp_path: Path) -> None:
    coordinator, store = coordinator_of(tmp_path)
    device = enrolled(coordinator, store, "board", new_key())
    coordinator.stopped(device, Stopped(reason="no power", code="x"))
    coordinator.act("pause", device.id, "a", "operator")
    coordinator.act("resume", device.id, "b", "operator")
    shown = coordinator.device_detail(device.id).device
    assert (shown.state, shown.note) == ("stopped", "no power")
    store.close()


def test_a_ban_during_a_join_holds(
    new_fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = new_fleet
    coordinator = server.coordinator
    state = server.config.state.parent / "2"
    key = DeviceKey.from_pem((state / "device.key").read_bytes(), "device.key")
    ahead = coordinator._plan_ahead

    def ban_meanwhile(*given: object) -> dict[str, str | None]:
        coordinator.act("ban", "board-1", "noise", "operator")
        return ahead(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(coordinator, "_plan_ahead", ban_meanwhile)
    time.sleep(1.1)  # a request with this key was signed in this second, when the fleet joined
    known = token(server.config, "board")
    with refused("join.banned"):
        CoordinatorClient(server.url, known, patience_s=0).join(
            lambda: key.join_request(known, "m", MACHINE)
        )


def test_a_banned_device_stays_listed_however_many_leave(tmp_path: Path) -> None:
    coordinator, store = coordinator_of(tmp_path)
    for number in range(MOST_LEFT + 3):
        device = enrolled(coordinator, store, "board", new_key())
        if number == 0:
            coordinator.act("ban", device.id, "noise", "operator")
        else:
            coordinator.leave(device)
    names = [device.id for device in store.registry.devices()]
    assert "board-1" in names
    assert "board-2" not in names
    coordinator.act("let-in", "board-1", "it was another", "operator")
    assert coordinator.device_detail("board-1").device.state == "enrolled"
    store.close()
