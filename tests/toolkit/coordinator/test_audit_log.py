"""The audit log of the operator's actions: killed at every write, it agrees with the state."""

import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from killing import Job, die_at
from operators import coordinator_of, enrolled, new_key
from parameters import some_long
from toolkit.coordinator.operation.messages import Action

SEQUENCE: list[tuple[Action, str]] = [
    *(("pause", "board-1"), ("resume", "board-1"), ("ban", "board-1"), ("let-in", "board-1")),
    *(("remove", "desktop-1"), ("pause", "desktop-2"), ("let-in", "desktop-1")),
    *(("remove", "desktop-2"), ("ban", "desktop-2"), ("let-in", "desktop-2")),
]


def act_all(
    folder: Path,
    job: Job | None,
    done: int,
    report: "multiprocessing.connection.Connection[int, None]",
) -> None:
    """Carry out the actions of SEQUENCE from number `done`, and report each that has returned."""
    if job is not None:
        die_at(job)
    coordinator, store = coordinator_of(folder)
    for number, (name, device) in enumerate(SEQUENCE[done:], done + 1):
        coordinator.act(name, device, f"number {number}", "operator")
        report.send(number)
    store.close()


def in_a_process(folder: Path, job: Job | None, done: int) -> tuple[int, int]:
    """Run `act_all` in a forked process. Returns its status, and the last action that returned."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            act_all(folder, job, done, theirs)
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    theirs.close()
    _, status = os.waitpid(pid, 0)
    while ours.poll():
        try:
            done = ours.recv()
        except EOFError:
            break
    return os.waitstatus_to_exitcode(status), done


def replayed(entries: Iterator[tuple[str, str]]) -> dict[str, tuple[bool, str | None]]:
    """Whether each device has left, and the decision about it, after these actions."""
    state: dict[str, tuple[bool, str | None]] = dict.fromkeys(
        ("desktop-1", "desktop-2", "board-1"), (False, None)
    )
    after = {
        "pause": (False, "paused"),
        "resume": (False, None),
        "remove": (True, "removed"),
        "ban": (True, "banned"),
        "let-in": (False, None),
    }
    for action, device in entries:
        state[device] = after[action]
    return state


@pytest.mark.parametrize(
    ("before", "step"), some_long([(True, 3), (True, 1), (False, 1)], (True, 1), (False, 1))
)
def test_killed_at_every_write_the_log_agrees_with_the_state(
    tmp_path: Path, before: bool, step: int, seed: int
) -> None:
    write, code = seed % step + 1 - step, -signal.SIGKILL
    while code == -signal.SIGKILL:
        write += step
        folder = tmp_path / str(write)
        _, store = coordinator_of(folder)
        for number, kind in enumerate(["desktop", "desktop", "board"]):
            store.registry.enrol(kind, f"m{number}", new_key(), "{}", lambda kind: None)
        store.close()
        code, done = in_a_process(folder, Job("", "", "", stop=write, before=before), 0)
        assert code in (0, -signal.SIGKILL)
        check(folder, done)
        kept = len(read(folder)[0])
        code_again, _ = in_a_process(folder, None, kept)
        assert code_again == 0
        check(folder, len(SEQUENCE))
    assert write > 2 * len(SEQUENCE)


def read(
    folder: Path,
) -> tuple[list[tuple[str, str]], dict[str, str], dict[str, bool]]:
    """The audit log, the decisions and who has left, read without the program."""
    connection = sqlite3.connect(folder / "state" / "state.sqlite3")
    log = connection.execute("SELECT action, target FROM audit ORDER BY number").fetchall()
    decisions = dict(connection.execute("SELECT device, outcome FROM decisions").fetchall())
    left = dict(connection.execute("SELECT id, has_left FROM devices").fetchall())
    connection.close()
    return log, decisions, left


def check(folder: Path, done: int) -> None:
    """The log has all actions that returned, in order, and the state is what they lead to."""
    log, decisions, left = read(folder)
    assert log == SEQUENCE[: len(log)]
    assert len(log) >= done
    state = replayed(iter(log))
    assert decisions == {name: known for name, (_, known) in state.items() if known is not None}
    assert {name: bool(gone) for name, gone in left.items()} == {
        name: gone for name, (gone, _) in state.items()
    }


def test_nothing_can_be_taken_from_the_log(tmp_path: Path) -> None:
    coordinator, store = coordinator_of(tmp_path)
    enrolled(coordinator, store, "board", new_key())
    coordinator.act("pause", "board-1", "x", "operator")
    with store._database.transaction() as db:
        for statement in ("DELETE FROM audit", "UPDATE audit SET reason = 'y'"):
            with pytest.raises(sqlite3.IntegrityError, match="the audit log only grows"):
                db.execute(statement)
    store.close()
