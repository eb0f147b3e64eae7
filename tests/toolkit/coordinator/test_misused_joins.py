"""Joins that somebody copies, that the device refuses, or whose token names no key."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.federation.identity.state_folder import Identity
from device_agent.federation.membership import join
from device_agent.system.clock import Clock
from profiles.errors import ClientError, TrustError
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.server import Server
from vector_fleet import (
    MACHINE,
    ask,
    configured,
    full_token,
    running,
    token,
)


def test_a_copied_join_is_of_no_use(server: Server, tmp_path: Path) -> None:
    bearer, key = token(server.config, "board"), DeviceKey.new()
    request = key.join_request(bearer, "desk", MACHINE)
    first = ask(server, request, bearer)
    secret = first.json()["secret"]
    for copied in (request, replace(request, name="mine", machine=MACHINE | {"cpu_count": 9})):
        answer = ask(server, copied, bearer)
        assert (first.status, answer.status) == (200, 403)
        assert answer.json()["code"] == "join.used-request"
    assert CoordinatorClient(server.url, secret).work().state == "wait"
    (only,) = server.coordinator.status().devices
    assert (only.device, only.name) == ("board-1", "desk")
    # The device itself signs another one, also within the same second.
    DeviceState(tmp_path / "a").folder.mkdir()
    (tmp_path / "a" / "device.key").write_bytes(key.pem())
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    now = [float(request.timestamp)]
    clock = Clock(lambda: now[0], lambda: True)
    again = join(server.url, bearer, "desk", tmp_path / "a", sleep=sleep, clock=clock)
    assert (again.device, slept) == ("board-1", [1])


def test_a_copied_join_is_of_no_use_after_a_restart(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        bearer = token(config, "board")
        request = DeviceKey.new().join_request(bearer, "desk", MACHINE)
        assert ask(server, request, bearer).status == 200
    with running(config) as server:
        assert ask(server, request, bearer).json()["code"] == "join.used-request"


def test_what_joins_have_signed_is_kept_only_while_it_is_valid(server: Server) -> None:
    used = server.coordinator.store.used_joins
    assert [used.take(b"a", 1000, 600), used.take(b"b", 1001, 600)] == [True, True]
    assert [used.take(b"a", 1600, 600), used.take(b"a", 1601, 600)] == [False, True]
    with server.coordinator.store._database.transaction() as db:
        (kept,) = db.execute("SELECT count(*) FROM meta WHERE key LIKE 'join:%'").fetchone()
    assert kept == 2


@pytest.mark.parametrize("cause", ["another key", "full disk", "forged words"])
def test_a_join_that_the_device_refuses_takes_no_place(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    bearer, state = token(server.config, "board"), tmp_path / "a"
    if cause == "another key":
        bearer += "." + "A" * 22
    elif cause == "forged words":
        invites = Coordinator.invitation
        monkeypatch.setattr(
            Coordinator, "invitation", lambda *given: replace(invites(*given), purpose="other")
        )
    else:
        monkeypatch.setattr(DeviceState, "remember", full_disk)
    for _ in range(2):  # the only place of its kind
        with pytest.raises((TrustError, OSError)):
            join(server.url, bearer, "desk", state)
        assert server.coordinator.rounds.devices == set()
        assert not state.exists()
    monkeypatch.undo()
    join(server.url, token(server.config, "board"), "desk", state)


def full_disk(state: DeviceState, identity: Identity) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_place_that_could_not_be_given_back_stays_the_devices(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(client: CoordinatorClient) -> None:
        raise ClientError("away")

    monkeypatch.setattr(DeviceState, "remember", full_disk)
    monkeypatch.setattr(CoordinatorClient, "leave", away)
    bearer = token(server.config, "board")
    with pytest.raises(OSError, match="No space left"):
        join(server.url, bearer, "desk", tmp_path / "a")
    monkeypatch.undo()
    assert join(server.url, bearer, "desk", tmp_path / "a").device == "board-1"
    assert len(server.coordinator.status().devices) == 1


def test_a_token_without_a_fingerprint_is_warned_of(
    server: Server, tmp_path: Path, said: list[str]
) -> None:
    join(server.url, token(server.config, "board"), "desk", tmp_path / "a")
    (warning,) = [line for line in said if "fingerprint" in line]
    assert f"has the fingerprint {server.coordinator.key.fingerprint}: " in warning
    said.clear()
    join(server.url, full_token(server.config, "desktop"), "pc", tmp_path / "b")
    assert not [line for line in said if "fingerprint" in line]
