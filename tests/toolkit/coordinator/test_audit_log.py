"""The audit log of the operator's actions: killed at every write, it agrees with the state."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from killed_actions import Step, audit, kill_at_every_write
from operators import coordinator_of, enrolled, new_key
from parameters import some_long
from toolkit.coordinator.operation.messages import Action

SEQUENCE: list[tuple[Action, str]] = [
    *(("pause", "board-1"), ("resume", "board-1"), ("ban", "board-1"), ("let-in", "board-1")),
    *(("remove", "desktop-1"), ("pause", "desktop-2"), ("let-in", "desktop-1")),
    *(("remove", "desktop-2"), ("ban", "desktop-2"), ("let-in", "desktop-2")),
]


def step(number: int, name: Action, device: str) -> Step:
    return lambda coordinator: coordinator.act(name, device, f"number {number}", "operator")


STEPS = [step(number, *action) for number, action in enumerate(SEQUENCE)]


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
    writes = kill_at_every_write(tmp_path, STEPS, prepare, check, before, seed % step + 1, step)
    assert writes > 2 * len(SEQUENCE)


def prepare(folder: Path) -> None:
    _, store = coordinator_of(folder)
    for number, kind in enumerate(["desktop", "desktop", "board"]):
        store.registry.enrol(kind, f"m{number}", new_key(), "{}", lambda kind: None)
    store.close()


def read(folder: Path) -> tuple[dict[str, str], dict[str, bool]]:
    """The decisions and who has left, read without the program."""
    connection = sqlite3.connect(folder / "state" / "state.sqlite3")
    decisions = dict(connection.execute("SELECT device, outcome FROM decisions").fetchall())
    left = dict(connection.execute("SELECT id, has_left FROM devices").fetchall())
    connection.close()
    return decisions, left


def check(folder: Path, done: int) -> None:
    """The log has all actions that returned, in order, and the state is what they lead to."""
    log, (decisions, left) = audit(folder), read(folder)
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
