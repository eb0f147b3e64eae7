"""Actions of an operator in a process that is killed at every write, one after another.

Each step is a function of a coordinator. A killed process leaves some steps undone: the next one
goes on with the first step whose entry the audit log does not have.
"""

import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from killing import Job, die_at
from operators import coordinator_of
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.storage.coordinator_store import Store

Step = Callable[[Coordinator], object]
Open = Callable[[Path], tuple[Coordinator, Store]]


def kill_at_every_write(
    folder: Path,
    steps: Sequence[Step],
    prepare: Callable[[Path], None],
    check: Callable[[Path, int], None],
    before: bool,
    first: int = 1,
    step: int = 1,
    opened: Open = coordinator_of,
) -> int:
    """Carry out `steps`, killed before or after the write `first`, then `first + step`, and so on.

    `prepare` makes the state folder of a federation in a new folder, and `opened` opens it. `check`
    gets this folder and how many steps have returned at least; it is called after the kill, and
    after the rest was done.
    Returns the number of the last write.
    """
    write, code = first - step, -signal.SIGKILL
    while code == -signal.SIGKILL:
        write += step
        place = folder / str(write)
        prepare(place)
        code, done = _in_a_process(place, steps, Job("", "", "", stop=write, before=before), opened)
        assert code in (0, -signal.SIGKILL)
        check(place, done)
        code_again, _ = _in_a_process(place, steps[len(audit(place)) :], None, opened)
        assert code_again == 0
        check(place, len(steps))
    return write


def audit(folder: Path) -> list[tuple[str, str]]:
    """The actions of the audit log and their targets, read without the program."""
    connection = sqlite3.connect(folder / "state" / "state.sqlite3")
    log = connection.execute("SELECT action, target FROM audit ORDER BY number").fetchall()
    connection.close()
    return log


def _in_a_process(
    folder: Path, steps: Sequence[Step], job: Job | None, opened: Open
) -> tuple[int, int]:
    """Carry out `steps` in a forked process. Returns its status, and how many steps returned."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            _carry_out(folder, steps, job, theirs, opened)
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    theirs.close()
    _, status = os.waitpid(pid, 0)
    done = 0
    while ours.poll():
        try:
            done = ours.recv()
        except EOFError:
            break
    return os.waitstatus_to_exitcode(status), done


def _carry_out(
    folder: Path,
    steps: Sequence[Step],
    job: Job | None,
    report: "Connection[int, None]",
    opened: Open,
) -> None:
    if job is not None:
        die_at(job)
    coordinator, store = opened(folder)
    for number, act in enumerate(steps, 1):
        act(coordinator)
        report.send(number)
    store.close()
