"""A state folder whose process is killed at every write and at random moments.

The process reports each call that has returned. What it reported must be there afterwards, and a
reader that knows only the file formats recomputes the model of every round from its updates.
"""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load, save

from device_agent.formats.protocol.fleet import RoundResult
from killing import Job, die_at
from parameters import some_long
from toolkit.coordinator.storage.coordinator_store import Store
from updates import record_of

Reports = list[tuple[str, int, str | None]]
"""(what, round, device) of each call that returned."""
DEVICES = ("a", "b")
ROUNDS = 4
RECORD = record_of("full", 1, ())


def update_of(round_: int, device: str) -> bytes:
    """Tensors that no other round or device sends."""
    return save({"w": np.full(8, 10 * round_ + DEVICES.index(device), np.float32)})


def work(folder: Path, report: Connection, job: Job | None) -> None:
    """Run rounds from where the folder is, until killed or done. The model adds up all updates."""
    if job is not None:
        die_at(job)
    store = Store(folder, 2)
    data = store.model()
    if data is None:
        store.add_result(RoundResult(round=0, accuracy=0.5, loss=1.0, updates=0), save_zero())
        report.send(("result", 0, None))
    while (round_ := store.history.results()[-1].round + 1) <= ROUNDS:
        store.set_bundles(round_, [("full", {"weights": store.model() or b""})])
        store.remove_unnamed()
        present = {device for device, _, _ in store.updates(round_)}
        for device in DEVICES:
            if device in present:
                continue
            entry = store.blobs.put(update_of(round_, device))
            store.add_update(round_, device, replace(RECORD, file=entry))
            report.send(("update", round_, device))
        total = load(store.model() or b"")["w"]
        for _, sha256, _ in store.updates(round_):
            total = total + load(store.blobs.path(sha256).read_bytes())["w"]
        result = RoundResult(round=round_, accuracy=0.5, loss=1.0, updates=len(DEVICES))
        store.add_result(result, save({"w": total}))
        report.send(("result", round_, None))
    store.close()


def save_zero() -> bytes:
    return save({"w": np.zeros(8, np.float32)})


def check(folder: Path, reported: Reports) -> None:
    """Read the folder without the program and compare it with what was reported."""
    connection = sqlite3.connect(folder / "state.sqlite3")  # undoes what was cut off
    models = dict(connection.execute("SELECT round, model FROM history WHERE kept").fetchall())
    rows = connection.execute("SELECT round, device, sha256 FROM updates").fetchall()
    past = connection.execute("SELECT round, device FROM past_updates").fetchall()
    last = connection.execute("SELECT max(round) FROM history").fetchone()[0]
    connection.close()
    updates = {(round_, device) for round_, device, _ in rows} | set(past)
    assert {report[1] for report in reported if report[0] == "result"} <= set(
        range((last or -1) + 1)
    ) | {0}
    assert {report[1:] for report in reported if report[0] == "update"} <= updates
    for round_, sha256 in models.items():
        data = (folder / "files" / sha256).read_bytes()
        assert hashlib.sha256(data).hexdigest() == sha256
        expected = sum(10 * n + k for n in range(1, round_ + 1) for k in (0, 1))
        assert load(data)["w"].tolist() == [float(expected)] * 8
    for round_, device, sha256 in rows:
        if round_ > (last or 0):
            assert (folder / "files" / sha256).read_bytes() == update_of(round_, device)
    marker = json.loads((folder / "federation.json").read_bytes()) if last else {"round": None}
    assert (marker["round"] or 0) <= (last or 0)


def last_round(folder: Path) -> int:
    """The last round that a kill has left in `folder`."""
    store = Store(folder)
    last = store.history.results()[-1].round
    store.close()
    return last


def run(folder: Path, job: Job | None, kill_after_s: float | None = None) -> tuple[int, Reports]:
    """Run `work` in a forked process; gives how it ended and what it reported."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            work(folder, theirs, job)
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    theirs.close()
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    reported = []
    while ours.poll():
        try:
            reported.append(ours.recv())
        except EOFError:
            break
    return os.waitstatus_to_exitcode(status), reported


@pytest.mark.parametrize(
    ("before", "step"), some_long([(True, 5), (True, 1), (False, 1)], (True, 1), (False, 1))
)
def test_killed_at_every_write(tmp_path: Path, before: bool, step: int, seed: int) -> None:
    write, code = seed % step + 1 - step, -signal.SIGKILL
    while code == -signal.SIGKILL:
        write += step
        folder = tmp_path / str(write)
        code, reported = run(folder, Job("", "", "", stop=write, before=before))
        assert code in (0, -signal.SIGKILL)
        if (folder / "state.sqlite3").exists() and reported:
            check(folder, reported)
        again, more = run(folder, None)
        assert again == 0
        check(folder, [*reported, *more])
        assert last_round(folder) == ROUNDS
    assert write > 40


def kill_at_random(folder: Path, draw: random.Random, times: int) -> None:
    for number in range(times):
        state, reported = folder / str(number), []
        code, attempts = -signal.SIGKILL, 0
        while code == -signal.SIGKILL:
            attempts += 1  # a slow machine needs longer
            code, more = run(state, None, draw.uniform(0, 0.1 * attempts))
            reported += more
            if reported:
                check(state, reported)
        assert code == 0
        assert last_round(state) == ROUNDS


def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, random.Random(seed), 3)


@pytest.mark.long
def test_killed_at_300_random_moments(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path, random.Random(seed), 300)
