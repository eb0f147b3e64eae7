"""Fleets of which nobody knows the size: open kinds, a quorum, and devices that stay away."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.membership import join
from refusals import refused
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.join_links import join_tokens
from toolkit.coordinator.server import Server
from vector_fleet import assert_soon, configured, joined, running, send_trained, task, token

OPEN = """
model = "toolkit.models:digits_cnn"
input_shape = [2]
rounds = 3
held_out = "held_out.npz"
port = 0
min_devices = 2
quorum = 2

[[devices]]
name = "phone"
submodel = "full"
count = "any"

[[devices]]
name = "board"
submodel = "low-rank:0.5"
"""
FORGETFUL = OPEN.replace("quorum = 2", 'forget_after = "1h"')


def enrol(server: Server, folder: Path, *kinds: str) -> Iterator[CoordinatorClient]:
    for kind in kinds:
        state = folder / f"{kind}-{len(list(folder.glob(f'{kind}-*')))}"
        known = join(server.url, token(server.config, kind), state.name, state)
        yield CoordinatorClient(server.url, known.secret, patience_s=0)


def test_phones_join_whenever_they_come(tmp_path: Path) -> None:
    told: list[str] = []
    with running(configured(tmp_path / "c", OPEN), say=told.append) as server:
        (first,) = enrol(server, tmp_path, "phone")
        work = first.work()
        assert (work.state, work.joined, work.expected) == ("wait", 1, 2)
        second, third = enrol(server, tmp_path, "phone", "phone")
        assert task(second).round == 1
        assert task(first).round == 1
        for number, link in enumerate((first, second)):
            send_trained(link, 1, tmp_path / f"one-{number}")
        # Two updates are the quorum. The third device goes on with the second round.
        assert_soon(lambda: server.coordinator.status().round == 2)
        assert task(third).round == 2
        assert server.coordinator.status().history[1].updates == 2
        states = {d.device: d.note for d in server.coordinator.status().devices}
        [phones] = [t for t in join_tokens(server.config.state, server.url) if t.kind == "phone"]
        assert (phones.count, phones.joined) == (None, 3)
    assert states["phone-1"] is None
    assert states["phone-3"] in (None, "round 1 closed before its update came")
    assert [line for line in told if "joined" in line] == [
        "phone-1 (phone-0) has joined: 1 place taken.",
        "phone-2 (phone-1) has joined: 2 places taken.",
        "phone-3 (phone-2) has joined: 3 places taken.",
    ]


def test_a_device_that_was_not_seen_loses_its_place_and_gets_it_back(tmp_path: Path) -> None:
    told: list[str] = []
    with running(configured(tmp_path / "c", FORGETFUL), say=told.append) as server:
        phone, board = enrol(server, tmp_path, "phone", "board")
        assert (task(phone).round, task(board).round) == (1, 1)
        send_trained(phone, 1, tmp_path / "one")
        # The round waits for the board, until it was not seen for an hour.
        assert server.coordinator.status().round == 1
        server.coordinator.activity["board-1"].seen_at -= 3601
        assert_soon(lambda: server.coordinator.status().round == 2)
        states = {d.device: d.state for d in server.coordinator.status().devices}
        assert states["board-1"] == "absent"
        assert task(phone).round == 2
        assert board.work().state == "wait"  # it is back, from the next round on
        send_trained(phone, 2, tmp_path / "two")
        assert task(board).round == 3
    assert [line for line in told if line.startswith("board-1")] == [
        "board-1 (board-0) has joined: 2 places taken.",
        "board-1 (board-0) was not seen for long and lost its place: 1 place taken.",
        "board-1 (board-0) is back: 2 places taken.",
    ]


def test_a_forgotten_device_whose_place_is_taken_joins_again(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", FORGETFUL)
    with running(config) as server:
        list(enrol(server, tmp_path, "phone", "board"))
        server.coordinator.activity["board-1"].seen_at -= 3601
        assert_soon(lambda: len(server.coordinator.store.registry.members()) == 1)
    with running(config) as server:  # a restart knows who was forgotten
        (other,) = enrol(server, tmp_path, "board")
        board = joined(server, tmp_path / "board-0")
        with refused("client.not-authorised") as caught:
            board.work()
        assert "board-1 was absent for too long, and another device has taken its place" in str(
            caught.value
        )
        other.leave()
        assert board.work().state in ("wait", "train")
        states = {d.device: d.state for d in server.coordinator.status().devices}
    assert states["board-1"] != "absent"
    assert states["board-2"] == "left"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'count = "any"',
            "count = 0",
            '`devices[0].count` is 0: it must be a whole number from 1 or "any".',
        ),
        (
            'count = "any"',
            "count = 0.5",
            '`devices[0].count` is 0.5: it must be a whole number from 1 or "any".',
        ),
        (
            'count = "any"',
            "",
            None,
        ),
        (
            "quorum = 2",
            "forget_after = 7",
            "`forget_after` is 7: Invalid time span '7': write a number and s, m, h or d, for "
            "example 10m.",
        ),
        (
            'quorum = 2\n\n[[devices]]\nname = "phone"\nsubmodel = "full"\ncount = "any"',
            'quorum = 3\n\n[[devices]]\nname = "phone"\nsubmodel = "full"',
            "`quorum` is 3, but only 2 devices can join: lower `quorum`, or set count = "
            '"any" for a kind.',
        ),
        (
            'quorum = 2\n\n[[devices]]\nname = "phone"\nsubmodel = "full"\ncount = "any"',
            'min_updates = 3\n\n[[devices]]\nname = "phone"\nsubmodel = "full"',
            "`min_updates` is 3, but only 2 devices can join: lower `min_updates`, or set count = "
            '"any" for a kind.',
        ),
        (
            "quorum = 2",
            "quorum = 2\nmin_updates = 3",
            "`quorum` is 2, but a round needs `min_updates` = 3 updates to close: raise `quorum`, "
            "or lower `min_updates`.",
        ),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, old: str, new: str, message: str | None) -> None:
    configured(tmp_path, OPEN)
    path = tmp_path / "fleet.toml"
    path.write_text(OPEN.replace(old, new))
    if message is None:
        assert load_config(path).places == 2
        return
    with refused("config.bad-value") as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("counts", "expected", "places"),
    [((2, 1), 3, 3), (("any", 3), 3, None), (("any", "any"), 1, None)],
)
def test_without_min_devices_the_first_round_waits_for_the_fixed_places(
    tmp_path: Path, counts: tuple[object, object], expected: int, places: int | None
) -> None:
    first, second = map(json.dumps, counts)
    text = OPEN.replace("min_devices = 2\nquorum = 2", "").replace('"any"', first)
    config = configured(tmp_path, f"{text}count = {second}\n")
    assert (config.expected_devices, config.places) == (expected, places)
