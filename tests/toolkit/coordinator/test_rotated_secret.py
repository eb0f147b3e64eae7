"""A device makes a new secret when the operator asks: nothing is lost, and no thief can do it."""

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.doctor.coordinator_checks import check_connection
from device_agent.federation import round_loop
from device_agent.federation.device_state import DeviceState
from device_agent.federation.fleet_status import fleet_status
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.federation.identity.state_folder import Identity, StateFolder
from device_agent.federation.membership import join, leave
from device_agent.federation.run_options import RunOptions
from killed_actions import audit, kill_at_every_write
from log_messages import logged
from operators import coordinator_of, operator
from parameters import some_long
from profiles.errors import AuthorisationError
from refusals import refused
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.device_registry import hashed
from toolkit.coordinator.refusals import RefusalError
from vector_fleet import (
    CONFIG,
    MACHINE,
    assert_soon,
    configured,
    full_token,
    running,
    train_vector,
)

ONE = CONFIG[: CONFIG.index("[[devices]]")] + '[[devices]]\nname = "board"\nsubmodel = "full"\n'
DAY = 86400


def train(state: Path, data: object) -> int:
    options = RunOptions(data=str(data), state=state)
    return round_loop.run(options, train=train_vector, patience_s=20, sleep=lambda seconds: None)


def works(url: str, secret: str) -> bool:
    try:
        CoordinatorClient(url, secret, patience_s=0).work()
    except AuthorisationError:
        return False
    return True


def test_a_device_makes_a_new_secret_between_two_polls(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", ONE)
    with running(config) as server:
        acting, state = operator(server), tmp_path / "one"
        old = join(server.url, full_token(config, "board"), "one", state).secret
        acting.act("pause", "board-1", "repair")
        until = acting.rotate_secret("board-1", 7, "a copy of the disk was lost").secret_until
        assert until is not None
        assert abs(until - time.time() - 7 * DAY) < 60
        assert acting.rotate_secret("board-1", 30, "again").secret_until == until
        assert acting.device("board-1").device.reason == "repair"  # the pause stays
        acting.act("resume", "board-1", "repaired")
        assert works(server.url, old)  # until the device has made a new one
        with logged("device_agent") as said:
            assert train(state, config.held_out) == 3
        assert "This device has a new secret, which the operator has asked for." in said
        new = DeviceState(state).member()
        assert new.next_secret is None
        assert works(server.url, new.secret)
        assert not works(server.url, old)
        assert acting.device("board-1").secret_until is None
        log = [(entry.action, entry.target, entry.reason) for entry in acting.audit().entries]
        assert ("rotate secret", "board-1", "a copy of the disk was lost") in log
        assert [action for action, *_ in log] == ["pause", "rotate secret", "resume"]
        kept = b"".join(file.read_bytes() for file in config.state.rglob("*") if file.is_file())
        assert new.secret.encode() not in kept
        leave(state)
        with refused("operator.not-a-member"):
            acting.rotate_secret("board-1", 7, "x")


class KilledError(BaseException):
    """Stands for the end of the agent's process."""


def dies(call: Callable[..., Any], before: bool) -> Callable[..., Any]:
    def killed(*arguments: Any) -> None:
        if not before:
            call(*arguments)
        raise KilledError

    return killed


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("place", ["first write", "request", "second write"])
def test_an_agent_that_is_killed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, before: bool
) -> None:
    """Before and after each write and the request: what the disk has is what is valid."""
    config = configured(tmp_path / "c", ONE)
    with running(config) as server:
        state = tmp_path / "one"
        old = join(server.url, full_token(config, "board"), "one", state).secret
        operator(server).rotate_secret("board-1", 7, "x")
        with monkeypatch.context() as patch:
            if place == "request":
                renew = CoordinatorClient.renew_secret
                patch.setattr(CoordinatorClient, "renew_secret", dies(renew, before))
            else:
                write, wanted = StateFolder.remember, place == "first write"

                def remember(folder: StateFolder, identity: Identity) -> None:
                    is_first = identity.next_secret is not None
                    (dies(write, before) if is_first is wanted else write)(folder, identity)

                patch.setattr(StateFolder, "remember", remember)
            with pytest.raises(KilledError):
                train(state, config.held_out)
        known = DeviceState(state).member()
        valid = [s for s in (known.secret, known.next_secret) if s and works(server.url, s)]
        assert len(valid) == 1
        if place == "request" and not before:
            assert fleet_status(state).round == 1
            found = [finding.detail for finding in check_connection(None, known, None)]
            assert "known there as board-1" in found
            with pytest.raises(AuthorisationError):
                CoordinatorClient(server.url, known.secret, patience_s=0).leave()
            leave(state)  # also leaves with the secret that the coordinator has taken
            return
        assert train(state, config.held_out) == 3
        again = DeviceState(state).member()
        assert again.secret not in (old, None)
        assert again.next_secret is None
        assert works(server.url, again.secret)


def test_an_agent_goes_on_whose_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated request is unknown, because the coordinator has taken the new secret."""
    config = configured(tmp_path / "c", ONE)
    with running(config) as server:
        state = tmp_path / "one"
        join(server.url, full_token(config, "board"), "one", state)
        operator(server).rotate_secret("board-1", 7, "x")
        renew, sent = CoordinatorClient.renew_secret, list[object]()

        def twice(client: CoordinatorClient, new: Any) -> None:
            sent.append(new)
            renew(client, new)
            renew(client, new)

        monkeypatch.setattr(CoordinatorClient, "renew_secret", twice)
        assert train(state, config.held_out) == 3
        assert len(sent) == 1
        known = DeviceState(state).member()
        assert known.next_secret is None
        assert works(server.url, known.secret)


def test_only_the_device_itself_makes_a_new_secret(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", ONE)
    with running(config) as server:
        state = tmp_path / "one"
        known = join(server.url, full_token(config, "board"), "one", state)
        key = DeviceKey.from_pem((state / "device.key").read_bytes(), "key")
        client = CoordinatorClient(server.url, known.secret, patience_s=0)
        with refused("secret.not-asked"):
            client.renew_secret(key.new_secret("", "new"))
        operator(server).rotate_secret("board-1", 7, "x")
        challenge = client.work().new_secret
        assert len(challenge) > 40
        with refused("secret.bad-signature"):  # a thief has the secret, not the key
            client.renew_secret(DeviceKey.new().new_secret(challenge, "new"))
        with refused("secret.used"):
            client.renew_secret(key.new_secret(challenge, known.secret))
        with refused("secret.not-asked"):
            client.renew_secret(key.new_secret(challenge[:-1] + "!", "new"))
        client.renew_secret(key.new_secret(challenge, "new"))
        with refused("client.not-authorised"):
            client.renew_secret(key.new_secret(challenge, "newer"))
        client.use_secret("new")
        with refused("secret.not-asked"):  # a repeated answer
            client.renew_secret(key.new_secret(challenge, "newer"))
        assert client.work().new_secret == ""


def test_after_the_time_the_old_secret_is_void_and_the_device_joins_again(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", ONE)
    with running(config) as server, logged("toolkit") as said:
        state = tmp_path / "one"
        known = join(server.url, full_token(config, "board"), "one", state)
        operator(server).rotate_secret("board-1", 1, "x")
        assert works(server.url, known.secret)
        server.coordinator.wall_clock = lambda: time.time() + 2 * DAY
        server.coordinator.changed.set()
        assert_soon(lambda: not works(server.url, known.secret))
        server.coordinator.wall_clock = time.time
        assert any("made no new secret in time" in line for line in said)
        with pytest.raises(AuthorisationError, match="join again with a token"):
            train(state, config.held_out)
        again = join(server.url, full_token(config, "board"), "one", state)
        assert (again.device, train(state, config.held_out)) == ("board-1", 3)


def test_a_restart_still_asks_and_a_join_answers(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", ONE)
    with running(config) as server:
        known = join(server.url, full_token(config, "board"), "one", tmp_path / "one")
        operator(server).rotate_secret("board-1", 7, "x")
    with running(config) as server:
        client = CoordinatorClient(server.url, known.secret, patience_s=0)
        assert client.work().new_secret
        file = tmp_path / "one" / "device.json"
        file.unlink()
        again = join(server.url, full_token(config, "board"), "one", tmp_path / "one")
        assert again.secret != known.secret
        assert not CoordinatorClient(server.url, again.secret, patience_s=0).work().new_secret
        operator(server).rotate_secret("board-1", 7, "x")
        operator(server).act("remove", "board-1", "sold")
        assert server.coordinator.secrets_due == {}


KEY = DeviceKey.new()


def prepare(folder: Path) -> None:
    _, store = coordinator_of(folder)
    public = KEY.join_request("board", "m", MACHINE).public_key
    store.registry.enrol("board", "m", public, "{}", lambda kind: None)
    store.close()


def ask(coordinator: Coordinator) -> None:
    coordinator.rotate_secret("board-1", 7, "x", "operator")


def answer(coordinator: Coordinator) -> None:
    device = coordinator.store.registry.device("board-1")
    try:
        coordinator.take_secret(device, KEY.new_secret(coordinator.new_secret(device), "new"))
    except RefusalError as refusal:
        if refusal.code != "secret.not-asked":  # a killed process has taken it
            raise


def check(folder: Path, done: int) -> None:
    """A device that was asked has its old secret until it has the new one, and never both."""
    log, connection = audit(folder), sqlite3.connect(folder / "state" / "state.sqlite3")
    (secret,) = connection.execute("SELECT secret FROM devices").fetchone()
    row = connection.execute("SELECT value FROM meta WHERE key = 'secrets due'").fetchone()
    connection.close()
    assert log == [("rotate secret", "board-1")][: len(log)]
    assert len(log) >= min(done, 1)
    is_new, due = secret == hashed("new"), json.loads(row[0]) if row else {}
    assert (due.keys() == {"board-1"}) is (bool(log) and not is_new)
    if done == 2:
        assert is_new


@pytest.mark.parametrize(
    ("before", "step"), some_long([(True, 3), (True, 1), (False, 1)], (True, 1), (False, 1))
)
def test_killed_at_every_write_the_coordinator_knows_one_secret(
    tmp_path: Path, before: bool, step: int, seed: int
) -> None:
    writes = kill_at_every_write(
        tmp_path, [ask, answer], prepare, check, before, seed % step + 1, step
    )
    assert writes > 4


def test_the_hash_that_is_sent_is_that_of_the_secret() -> None:
    made = KEY.new_secret("challenge", "secret")
    assert made.secret_sha256 == hashlib.sha256(b"secret").hexdigest()
