"""Asynchronous rounds of a coordinator that is killed at each write.

The devices and the operator are in this process, the coordinator in another one. Each training adds
1 to a number of its own. So the model shows how often each update counts, and with which weight.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import MANIFEST, WEIGHTS
from killed_actions import audit
from killing import Job, die_at
from operators import coordinator_of, new_key
from parameters import some_long
from toolkit.coordinator.closing.round_worker import RoundWorker
from toolkit.coordinator.coordinator import Coordinator, restore
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.refusals import RefusalError
from toolkit.coordinator.storage.coordinator_store import FLIGHTS, Store
from vector_fleet import CONFIG, SIZE, VectorModel, configured
from waiting_fleet import update_of

ROUNDS, BUFFER, STALEST = 6, 2, 2
ASYNC = CONFIG.replace(
    "rounds = 3",
    f"rounds = {ROUNDS}\nbuffer_size = {BUFFER}\nmax_staleness = {STALEST}\n"
    'mode = "async"\nkeep = 1\ndeadline_s = 60.0',
)
DEVICES = ("desktop-1", "desktop-2", "board-1")
PAUSED = "desktop-2"
"""The operator pauses this device for a while."""
MOST_STEPS = 400


class Served:
    """The coordinator of a folder, as its own process sees it."""

    def __init__(self, folder: Path, stop: int | None, before: bool) -> None:
        config, self.now = load_config(folder / "fleet.toml"), 1.0
        self.store = Store(config.state, config.kept_models)
        if stop is not None:
            write = die_at(Job("", "", "", stop=stop, before=before))
            self.store._database._connection.set_trace_callback(
                lambda statement: write() if statement == "COMMIT" else None
            )
        self.coordinator: Coordinator = restore(config, self.store, lambda: self.now)
        held_out = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
        self.worker = RoundWorker(self.coordinator, VectorModel(), held_out, lambda: None)
        self.worker.resume()
        self.turn()

    def turn(self) -> str:
        """Close a round and open the next one, after some seconds. Returns the phase."""
        for _ in range(3):
            self.now += 1
            self.worker.turn()
        return self.coordinator.rounds.phase

    def ask(self, name: str) -> tuple[int, bytes, bytes] | None:
        """The round that a device has to train, its manifest and weights; None if it waits."""
        work = self.coordinator.work(self.store.registry.device(name))
        if work.state != "train":
            return None
        files = {f.name: self.store.blobs.path(f.sha256).read_bytes() for f in work.files}
        return work.round, files[MANIFEST], files[WEIGHTS]

    def send(self, name: str, round_: int, tensors: bytes, record: bytes) -> bool:
        """Send an update. Returns whether it was taken."""
        device = self.store.registry.device(name)
        sha256 = fingerprint(tensors).sha256
        if not self.coordinator.upload(device, round_, sha256).complete:
            with self.coordinator.open_upload(device, round_, sha256, 0) as received:
                received.write(tensors)
                self.coordinator.keep_upload(device, round_, received)
        self.coordinator.take_update(device, round_, record)
        return True

    def pause(self, name: str) -> None:
        self.coordinator.act("pause", name, "x", "operator")

    def let_go_on(self, name: str) -> None:
        self.coordinator.act("resume", name, "x", "operator")

    def drop(self, name: str) -> None:
        self.coordinator.drop_update(self.coordinator.rounds.round, name, "x", "operator")


def serve(folder: Path, asked: Connection, stop: int | None, before: bool) -> None:
    """Answer calls of `Served`; a refusal is answered by its code."""
    served = Served(folder, stop, before)
    asked.send(None)
    while True:
        name, *arguments = asked.recv()
        try:
            asked.send(getattr(served, name)(*arguments))
        except RefusalError as error:
            asked.send(error.code)


@dataclass
class Training:
    """A training of a device.

    Attributes:
        number: The number of the model to which it adds 1.
        round: The round whose model it trains.
        kills: How often the coordinator had been killed when it gave the work.
        known: Whether the coordinator has written that the device trains, as it does in each turn.
        taken: Whether the device has a receipt for the update.
    """

    number: int
    round: int
    tensors: bytes
    record: bytes
    kills: int
    known: bool = False
    taken: bool = False

    @property
    def sha256(self) -> str:
        return fingerprint(self.tensors).sha256


@dataclass
class Fleet:
    """The devices and the operator of the coordinator of `folder`.

    Attributes:
        trainings: All trainings so far.
        holding: The training of each device that has not been sent.
        counted: The hash of the tensors of each update in a closed round, by round and device.
        dropped: The hashes of updates that the operator took out.
        log: The actions of the operator that returned.
        kills: How often the coordinator was killed.
    """

    folder: Path
    stop: int | None
    before: bool = True
    trainings: list[Training] = field(default_factory=list)
    holding: dict[str, Training] = field(default_factory=dict)
    counted: dict[tuple[int, str], str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    log: list[tuple[str, str]] = field(default_factory=list)
    kills: int = 0

    def start(self) -> None:
        """Start the coordinator. Only the first one is killed."""
        self.link, theirs = multiprocessing.Pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                self.link.close()
                serve(self.folder, theirs, None if self.kills else self.stop, self.before)
            except BaseException as error:
                print(repr(error), flush=True)
            os._exit(1)
        theirs.close()

    def end(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)

    def call(self, *request: Any) -> Any:
        """Call the coordinator until it answers. After a kill it is started again."""
        while True:
            try:
                self.link.send(request)
                return self.link.recv()
            except (EOFError, OSError):
                self.restart()

    def restart(self) -> None:
        _, status = os.waitpid(self.process, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        self.kills += 1
        self.check()
        self.start()
        assert self.link.recv() is None

    def begin(self) -> None:
        self.start()
        try:
            assert self.link.recv() is None
        except EOFError:
            self.restart()

    def act(self, name: str, device: str, entry: tuple[str, str]) -> None:
        """Let the operator act. The operator reads the log before another try."""
        before = len(audit(self.folder))
        kills = self.kills
        answer = self.call(name, device) if len(audit(self.folder)) == before else None
        if answer is None or (kills < self.kills and len(audit(self.folder)) > before):
            self.log.append(entry)

    def step(self, draw: random.Random) -> str:
        """What one device, the operator or the time does next. Returns the phase."""
        name = draw.choice(DEVICES)
        if name in self.holding:
            self.send(name)
        else:
            self.ask(name)
        self.note_counted()
        if draw.random() < 0.4:
            return "unknown"
        return self.turn()

    def ask(self, name: str) -> None:
        """Let a device train, if the coordinator gives it work."""
        if (work := self.call("ask", name)) is None:
            return
        round_, manifest, weights = work
        number = len(self.trainings)
        trained = load(weights)["w"].copy()
        trained[number] += 1
        update = update_of({"w": trained}, manifest, samples=10)
        self.holding[name] = Training(number, round_, *update, self.kills)
        self.trainings.append(self.holding[name])

    def send(self, name: str) -> None:
        """Let a device send its update."""
        held = self.holding[name]
        answer = self.call("send", name, held.round, held.tensors, held.record)
        if answer != "round.closing":
            held.taken = answer is True
            assert held.taken or self.may_refuse(name, held), (answer, held.number)
            del self.holding[name]

    def turn(self) -> str:
        """Let time pass at the coordinator. Returns the phase."""
        phase: str = self.call("turn")
        for training in self.holding.values():
            training.known |= training.kills == self.kills
        self.note_counted()
        return phase

    def may_refuse(self, name: str, held: Training) -> bool:
        """Whether no round takes an update, its receipt was lost, or its device was paused.

        A coordinator that is killed right after it gave work does not know that device.
        """
        self.note_counted()
        with closing(sqlite3.connect(self.folder / "state" / "state.sqlite3")) as db:
            (last,) = db.execute("SELECT coalesce(max(round), 0) FROM history").fetchone()
        too_old = last + 1 - held.round > STALEST or last == ROUNDS
        unknown = self.kills > 0 and not held.known
        return too_old or unknown or held.sha256 in self.counted.values() or name == PAUSED

    def note_counted(self) -> None:
        with closing(sqlite3.connect(self.folder / "state" / "state.sqlite3")) as db:
            (last,) = db.execute("SELECT coalesce(max(round), 0) FROM history").fetchone()
            rows = db.execute("SELECT round, device, sha256 FROM updates WHERE round <= ?", (last,))
            self.counted |= {(round_, device): sha256 for round_, device, sha256 in rows}

    def check(self) -> None:
        """After a kill: nothing that was promised is lost, and the log agrees with the state."""
        self.note_counted()
        with closing(sqlite3.connect(self.folder / "state" / "state.sqlite3")) as db:
            kept = [sha256 for (sha256,) in db.execute("SELECT sha256 FROM updates")]
            row = db.execute("SELECT value FROM meta WHERE key = ?", (FLIGHTS,)).fetchone()
            flights = {} if row is None else json.loads(row[0])
            for name, training in self.holding.items():
                training.known |= flights.get(name) == training.round
            decided = dict(db.execute("SELECT device, outcome FROM decisions").fetchall())
        known = Counter({*kept, *self.counted.values()})
        for training in self.trainings:
            assert not training.taken or known[training.sha256] or training.sha256 in self.dropped
        assert Counter(kept).most_common(1)[0][1] == 1 if kept else True
        log = audit(self.folder)
        assert log[: len(self.log)] == self.log
        assert len(log) <= len(self.log) + 1
        paused = [device for action, device in log if action in ("pause", "resume")]
        assert decided == ({paused[-1]: "paused"} if len(paused) % 2 else {})

    def expected(self) -> np.ndarray:
        """FedBuff, written out: each round adds the mean of its changes, less for stale ones."""
        by_hash = {training.sha256: training for training in self.trainings}
        model = np.zeros(SIZE)
        for round_ in range(1, ROUNDS + 1):
            counted = [by_hash[sha] for (r, _), sha in self.counted.items() if r == round_]
            for training in counted:
                stale = round_ - training.round
                model[training.number] += 1 / np.sqrt(1 + stale) / len(counted)
        return model


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation that all devices have joined."""
    folder = tmp_path_factory.mktemp("joined")
    _, store = coordinator_of(folder)
    for number, name in enumerate(DEVICES):
        store.registry.enrol(name.partition("-")[0], f"m{number}", new_key(), "{}", lambda k: None)
    store.close()
    configured(folder, ASYNC)
    return folder


def lived(folder: Path, stop: int | None, before: bool, seed: int) -> Fleet:
    """A fleet after all rounds, whose coordinator was killed at the write `stop`."""
    fleet, draw = Fleet(folder, stop, before), random.Random(seed)
    fleet.begin()
    try:
        for number in range(MOST_STEPS):
            if fleet.step(draw) == "finished":
                break
            if number == 6:
                fleet.act("pause", PAUSED, ("pause", PAUSED))
            if number == 12:
                fleet.act("let_go_on", PAUSED, ("resume", PAUSED))
            if number in (9, 20):
                drop_one(fleet)
        else:
            pytest.fail("the rounds do not end")
        fleet.check()
    finally:
        fleet.end()
    return fleet


def test_a_training_goes_on_though_its_round_closes_after_a_kill(
    federation: Path, tmp_path: Path
) -> None:
    """The device asks for nothing in between, as agents that train do for a minute."""
    folder = tmp_path / "c"
    shutil.copytree(federation, folder)
    fleet = Fleet(folder, None)
    fleet.begin()
    try:
        fleet.ask("board-1")
        fleet.turn()
        os.kill(fleet.process, signal.SIGKILL)
        for name in ("desktop-1", "desktop-2"):
            fleet.ask(name)
            fleet.send(name)
        fleet.turn()
        fleet.ask("desktop-1")
        assert fleet.holding["desktop-1"].round == 2
        fleet.send("board-1")
        assert (fleet.kills, fleet.trainings[0].round, fleet.trainings[0].taken) == (1, 1, True)
    finally:
        fleet.end()


def drop_one(fleet: Fleet) -> None:
    """Take an update out of the open round, if it has one."""
    with closing(sqlite3.connect(fleet.folder / "state" / "state.sqlite3")) as db:
        (last,) = db.execute("SELECT coalesce(max(round), 0) FROM history").fetchone()
        row = db.execute(
            "SELECT device, sha256 FROM updates WHERE round = ?", (last + 1,)
        ).fetchone()
    if row is not None:
        before = len(fleet.log)
        fleet.dropped.add(row[1])  # it may be dropped before a kill
        fleet.act("drop", row[0], (f"drop update of round {last + 1}", row[0]))
        if len(fleet.log) == before:
            fleet.dropped.remove(row[1])


def stops(first: int, step: int) -> Iterator[int]:
    while True:
        yield first
        first += step


@pytest.mark.parametrize(
    ("before", "step"), some_long([(True, 200), (True, 1), (False, 1)], (True, 1), (False, 1))
)
def test_killed_at_every_write_nothing_is_lost_or_counted_twice(
    federation: Path, tmp_path: Path, before: bool, step: int, seed: int
) -> None:
    for stop in stops(seed % step + 1, step):
        folder = tmp_path / str(stop)
        shutil.copytree(federation, folder)
        fleet = lived(folder, stop, before, seed)
        model = load_file(folder / "state" / "global.safetensors")["w"]
        np.testing.assert_allclose(model, fleet.expected(), rtol=1e-6, atol=1e-7)
        counted = Counter(fleet.counted.values())
        assert set(counted.values()) == {1}
        for training in fleet.trainings:
            if training.taken and training.sha256 not in fleet.dropped:
                assert counted[training.sha256] == 1
            assert not (training.sha256 in fleet.dropped and counted[training.sha256])
        if not fleet.kills:
            break
    print(f"{stop} writes")
    assert stop > 60
