"""The coordinator's key is replaced: devices follow the signature of the old key, and no other."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from altering_proxy import in_between
from commands import command, edgetailor, environment, run
from device_agent.doctor.coordinator_checks import check_connection
from device_agent.doctor.finding import Finding
from device_agent.federation import round_loop
from device_agent.federation.device_state import DeviceState
from device_agent.federation.fleet_status import lines
from device_agent.federation.identity.trusted_key import new_key
from device_agent.federation.membership import join, leave
from device_agent.federation.run_options import RunOptions
from device_agent.formats.protocol.fleet import KeyFollowed
from device_agent.formats.protocol.key_changes import KeyChange, KeyChanges
from device_agent.formats.protocol.rounds import Progress
from device_agent.formats.signed_work import key_fingerprint, split_token
from device_agent.system.clock import Clock
from killed_actions import audit, kill_at_every_write
from log_messages import logged
from operators import operator
from parameters import some_long
from refusals import refused
from toolkit.cli.operator.access_commands import rotate_key
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.coordinator import restore as started
from toolkit.coordinator.database.key_log import KEY, NEXT_KEY
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_secrets import read_secrets
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.backup import backup, restore
from toolkit.coordinator.storage.coordinator_store import Store
from vector_fleet import (
    CONFIG,
    VectorModel,
    assert_soon,
    configured,
    full_token,
    running,
    train_vector,
)

ONE = CONFIG[: CONFIG.index("[[devices]]")] + '[[devices]]\nname = "board"\nsubmodel = "full"\n'
DAY = 86400
NOW = 1_800_000_000


def chain(count: int, days: Sequence[float]) -> tuple[list[CoordinatorKey], list[KeyChange]]:
    """Keys that replaced one another a day apart, and the changes."""
    keys = [CoordinatorKey() for _ in range(count)]
    changes = [
        old.hands_over(new, NOW + n * DAY, int(NOW + (n + days[n]) * DAY))
        for n, (old, new) in enumerate(pairwise(keys))
    ]
    return keys, changes


@given(st.integers(1, 5), st.data())
def test_a_device_follows_the_changes_from_its_own_key(count: int, data: st.DataObject) -> None:
    days = data.draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    keys, changes = chain(count, days)
    start, day = data.draw(st.integers(0, count - 1)), data.draw(st.floats(0, 40))
    shuffled = data.draw(st.permutations(changes))
    clock = Clock(lambda: NOW + day * DAY)
    needed = changes[start:]
    late = any(clock.now() > change.until for change in needed)
    if late:
        with refused("trust.late-key"):
            new_key(keys[start].fingerprint, shuffled, "http://x", clock)
    else:
        expected = keys[-1].public if needed else None
        assert new_key(keys[start].fingerprint, shuffled, "http://x", clock) == expected
    assert new_key(CoordinatorKey().fingerprint, shuffled, "http://x", clock) is None


@given(st.sampled_from(["old", "new", "made", "until", "signature", "signer"]))
def test_an_altered_change_is_refused(part: str) -> None:
    (first, second), (change,) = chain(2, [30, 30])
    other = CoordinatorKey()
    forged = {
        "old": replace(change, old=other.public),  # signed with another key
        "new": replace(change, new=other.public),
        "made": replace(change, made=change.made + 1),
        "until": replace(change, until=change.until + 1),
        "signature": replace(change, signature=""),
        "signer": replace(other.hands_over(second, change.made, change.until), old=first.public),
    }[part]
    with refused("trust.forged-key"):
        new_key(key_fingerprint(forged.old), [forged], "http://x", Clock(lambda: NOW))


def test_a_circle_of_changes_ends() -> None:
    first, second = CoordinatorKey(), CoordinatorKey()
    circle = [first.hands_over(second, NOW, NOW + 1), second.hands_over(first, NOW, NOW + 1)]
    clock = Clock(lambda: NOW)
    assert new_key(first.fingerprint, circle, "http://x", clock) == first.public


def train(state: Path, data: object) -> int:
    options = RunOptions(data=str(data), state=state)
    return round_loop.run(options, train=train_vector, patience_s=20, sleep=lambda seconds: None)


def membership(server: Server, state: Path) -> Finding:
    """What `doctor` finds about the membership of this device."""
    found = check_connection(server.url, DeviceState(state).member(), None)
    return next(finding for finding in found if finding.check == "membership")


def test_devices_and_tokens_follow(tmp_path: Path) -> None:
    """Rounds go on with a device, a token file and a made link from before two rotations."""
    config = configured(tmp_path / "c", f"min_devices = 1\n{ONE}count = 3\n")
    with running(config) as server:
        acting, state = operator(server), tmp_path / "one"
        before = full_token(config, "board")
        made = acting.make_join_token("board", "a link", 1).token
        join(server.url, before, "one", state)
        first = server.coordinator.key
        assert acting.status().new_key is None
        for number in (1, 2):
            old = server.coordinator.key.fingerprint
            answer = acting.rotate_key(old, 30, f"number {number}")
            assert acting.rotate_key(old, 30, "again") == answer
            assert answer.fingerprint == server.coordinator.key.fingerprint != old
            assert [known.fingerprint for known in answer.earlier][-1] == old
        assert full_token(config, "board") == f"{split_token(before)[0]}.{answer.fingerprint}"
        checks = {
            c.check: c for c in check_connection(server.url, DeviceState(state).member(), None)
        }
        assert checks["membership"].result == "PASS"
        assert "will follow a new key" in checks["membership"].detail
        for number, given in enumerate((before, made)):
            place = tmp_path / f"later {number}"
            join(server.url, given, "later", place)
            assert DeviceState(place).member().key == server.coordinator.key.public
            assert (acting.key_state().followed, acting.key_state().devices) == (1, 2)
            leave(place)
        until = answer.earlier[-1].until
        assert acting.status().new_key == KeyFollowed(followed=0, devices=1, until=until)
        assert "0 of 1 device follow the coordinator's new key" in "".join(lines(acting.status()))
        assert acting.device("board-1").device.follows_key is False
        with logged("device_agent") as said:
            assert train(state, config.held_out) == 3
        assert [line for line in said if "has a new key, signed with" in line] == [
            "The coordinator has a new key, signed with the earlier one: its fingerprint is "
            f"{answer.fingerprint}."
        ]
        assert DeviceState(state).member().key == server.coordinator.key.public != first.public
        log = [(entry.action, entry.reason) for entry in acting.audit().entries]
        assert log[1:] == [("rotate key", "number 1"), ("rotate key", "number 2")]
        with refused("operator.other-key"):
            acting.rotate_key(first.fingerprint, 30, "x")
        for days in (0, -1, 36501, float("nan")):
            with refused("client.bad-request"):
                acting.rotate_key(answer.fingerprint, days, "x")
        assert acting.key_state() == replace(answer, followed=1)
        assert acting.status().new_key is None
        assert acting.device("board-1").device.follows_key is True
    with running(config) as server:  # it is known also after a restart
        assert server.coordinator.key_state() == replace(answer, followed=1)


def test_a_device_follows_only_once_it_has_checked_work(tmp_path: Path) -> None:
    """A training that asks whether its round is open gets work, but does not check it."""
    config = configured(tmp_path / "c", ONE)
    with running(config) as server:
        join(server.url, full_token(config, "board"), "one", tmp_path / "one")
        coordinator = server.coordinator
        assert_soon(lambda: coordinator.rounds.phase == "training")
        device = coordinator.store.registry.device("board-1")
        coordinator.work(device)
        coordinator.progress(device, Progress(state="downloading"))
        coordinator.rotate_key(coordinator.key.fingerprint, 30, "x", "me")
        coordinator.work(device)
        coordinator.progress(device, Progress(state="training"))
        assert coordinator.key_state().followed == 0
        coordinator.work(device)
        coordinator.progress(device, Progress(state="downloading"))
        assert coordinator.key_state().followed == 1


def test_a_device_and_a_token_that_missed_the_time_are_told_what_to_do(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", ONE)
    with running(config) as server:
        before, state = full_token(config, "board"), tmp_path / "one"
        join(server.url, before, "one", state)
        old = DeviceState(state).member()
        server.coordinator.wall_clock = lambda: time.time() - 2 * DAY
        operator(server).rotate_key(server.coordinator.key.fingerprint, 1, "x")
        server.coordinator.wall_clock = time.time
        with refused("trust.late-key", url=server.url) as error:
            train(state, config.held_out)
        assert "Join again with a new token of the operator" in str(error.value)
        assert DeviceState(state).member() == old
        with refused("trust.late-key"):
            join(server.url, before, "two", tmp_path / "two")
        assert DeviceState(tmp_path / "two").identity() is None
        [membership] = [
            c for c in check_connection(server.url, old, None) if c.check == "membership"
        ]
        assert membership.result == "FAIL"
        # The remedy: the same device joins again with the new token file, and trains.
        again = join(server.url, full_token(config, "board"), "one", state)
        assert again.device == old.device
        assert train(state, config.held_out) == 3


def test_a_forged_new_key_is_not_followed(tmp_path: Path) -> None:
    """Somebody on the way has a key of their own, signs the work and offers the key."""
    config, theirs = configured(tmp_path / "c", ONE), CoordinatorKey()
    with running(config) as server:
        known = server.coordinator.key
        change = theirs.hands_over(theirs, NOW, 4 * NOW)
        offered = KeyChanges(changes=[replace(change, old=known.public)])

        def altered(answer: dict[str, object]) -> dict[str, object]:
            if "changes" in answer:
                return dict(msgspec.to_builtins(offered))
            return answer | {"signature": ""} if answer.get("state") == "train" else answer

        with in_between(server.url, altered) as url:
            join(url, full_token(config, "board"), "one", tmp_path / "one")
            with refused("trust.forged-key", url=url):
                train(tmp_path / "one", config.held_out)
        assert DeviceState(tmp_path / "one").member().key == known.public


def test_old_changes_do_not_bring_back_an_old_key(tmp_path: Path) -> None:
    """A replayed answer from between two rotations does not move a device that knows the last."""
    keys, changes = chain(3, [30, 30])
    assert new_key(keys[2].fingerprint, changes[:1], "http://x", Clock(lambda: NOW)) is None
    assert new_key(keys[2].fingerprint, changes, "http://x", Clock(lambda: NOW)) is None


def restarted(folder: Path) -> tuple[Coordinator, Store]:
    """The coordinator as `serve` opens it."""
    server = Server(configured(folder, ONE), VectorModel(), folder / "fleet.toml")
    server._socket.close()
    return server.coordinator, server._store


def opened(folder: Path) -> tuple[Coordinator, Store]:
    """The same, without what a start writes."""
    config = configured(folder, ONE)
    store = Store(config.state)
    coordinator = started(config, store, lambda: 1.0)
    coordinator.key = read_secrets(config, store, False).key
    return coordinator, store


def rotate(coordinator: Coordinator) -> object:
    return coordinator.rotate_key(coordinator.key.fingerprint, 30, "x", "operator")


def prepare(folder: Path) -> None:
    restarted(folder)[1].close()


def check(folder: Path, done: int) -> None:
    """The key that the log names is in the files, after a restart and in a restored backup."""
    log = audit(folder)
    assert len(log) in (done, 1)
    again, places = folder / "again", [folder]
    if not again.exists():
        backup(folder / "state", folder / "saved")
        restore(folder / "saved", again / "state")
        places.append(again)
    for place in places:
        coordinator, store = restarted(place)
        key, changes = coordinator.key, coordinator.key_changes
        store.close()
        assert len(changes) == len(log)
        for change in changes:
            assert log == [("rotate key", f"key {key.fingerprint}")]
            assert new_key(key_fingerprint(change.old), changes, "http://x") == key.public
        state = place / "state"
        assert not (state / NEXT_KEY).exists()
        assert (state / KEY).read_bytes() == key.pem()
        assert (state / KEY).stat().st_mode & 0o777 == 0o600
        assert full_token(coordinator.config, "board").endswith(f".{key.fingerprint}")


@pytest.mark.parametrize(
    ("before", "step"), some_long([(True, 8), (True, 1), (False, 1)], (True, 1), (False, 1))
)
def test_killed_at_every_write_the_key_fits_the_log(
    tmp_path: Path, before: bool, step: int, seed: int
) -> None:
    writes = kill_at_every_write(
        tmp_path, [rotate], prepare, check, before, seed % step + 1, step, opened
    )
    assert writes > 8


def test_a_backup_while_the_key_is_replaced_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, store = restarted(tmp_path)
    rotations, copy_file = [], backup.__globals__["copy_file"]

    def copying(source: Path, target: Path) -> None:
        if source.name == "board.token" and not rotations:
            rotations.append(rotate(coordinator))
        copy_file(source, target)

    monkeypatch.setitem(backup.__globals__, "copy_file", copying)
    backup(tmp_path / "state", tmp_path / "saved")
    restore(tmp_path / "saved", tmp_path / "again" / "state")
    store.close()
    again, store = restarted(tmp_path / "again")
    assert (again.key.public, len(rotations)) == (coordinator.key.public, 1)
    store.close()


SERIES = """
model = "models_for_tests:four_columns"
input_shape = [4]
rounds = 4
held_out = "rows.csv"
port = 0
[data]
kind = "series"
columns = ["a", "b", "c", "d"]
label = "y"
classes = ["no", "yes"]
[training]
batch_size = 2
epochs = 1
[[devices]]
name = "pc"
submodel = "full"
"""


@pytest.mark.long
def test_an_agent_trains_across_a_rotation(tmp_path: Path) -> None:
    """The agent and the operator are processes of their own; the agent is not started again."""
    (tmp_path / "fleet.toml").write_text(SERIES)
    (tmp_path / "rows.csv").write_text("a,b,c,d,y\n1,2,3,4,yes\n0,0,1,-1,no\n5,4,3,2,yes\n")
    config = load_config(tmp_path / "fleet.toml")
    here = ("--federation", "fleet.toml", "--reason", "yearly")
    with running(config, federation(config)) as server:
        coordinator = server.coordinator
        given = ("--token-file", "state/tokens/pc.token", "--state", "pc")
        assert run("edgetailor-agent", "join", server.url, *given, cwd=tmp_path).code == 0
        arguments = command("edgetailor-agent", "run", "--data", "rows.csv", "--state", "pc")
        agent = subprocess.Popen(
            arguments, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
        )
        try:
            assert_soon(lambda: coordinator.rounds.phase == "training", 60)
            coordinator.pause_rounds("while the key is replaced", "operator")
            assert_soon(lambda: coordinator.rounds.done > 0, 60)
            done = coordinator.rounds.done
            before = coordinator.key.fingerprint
            told = edgetailor("rotate-key", "--valid", "12h", *here, cwd=tmp_path)
            after = coordinator.key.fingerprint
            assert (told.code, told.stdout) == (0, "")
            assert told.stderr.startswith(
                f"The new key has the fingerprint {after}. Devices follow until 20"
            )
            coordinator.resume_rounds("go on", "operator")
            _, said = agent.communicate(timeout=120)
        finally:
            agent.kill()
            agent.wait()
        assert agent.returncode == 0, said
        assert 0 < done < coordinator.rounds.done == 4
        assert before != after
        assert f"signed with the earlier one: its fingerprint is {after}" in said


@pytest.mark.parametrize("given", ["0s", "36501d"])
def test_the_time_to_follow_has_limits(given: str) -> None:
    with pytest.raises(click.BadParameter, match="at most 36500 days"):
        rotate_key.main(["--valid", given, "--reason", "x"], standalone_mode=False)
