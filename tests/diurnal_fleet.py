"""A fleet whose devices come and go, on a coordinator that is killed. Its time is compressed.

A second of the fleet lasts 1 / `speed` s here, on the devices as on the coordinator. A device is a
real connection that sends what an agent sends. The coordinator is a process of its own.
"""

import asyncio
import importlib
import json
import logging
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from commands import warm_context
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import MANIFEST, WEIGHTS
from toolkit.simulation.daily_absence import Absence
from waiting_fleet import Link

RETRY_S = 0.2
"""How long a device waits after its connection was lost, or after 503, on this machine."""
TIMES = {
    "toolkit.coordinator.closing.device_selection": ("SEEN_WITHIN_S", "ALL_HERE_S", "FEW_HERE_S"),
    "toolkit.coordinator.closing.round_worker": ("TICK_S",),
    "toolkit.coordinator.rounds.poll_interval": ("SHORTEST_S", "LONGEST_S"),
}
"""The times of the coordinator that a fleet notices. `deadline_s` is in the federation's file."""
ROUND = re.compile(r"(\d+\.\d+) Round (\d+)(?: of \d+)?: accuracy (\S+), .*, from (\d+) update")

Train = Callable[[int, bytes, bytes], tuple[bytes, bytes]]
"""(number of a device, weights, manifest) -> the tensors of its update, and the record."""
Serve = Callable[[Path], None]
"""Serves the federation of a file until the process is killed."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How devices behave, in seconds of the fleet.

    Attributes:
        speed: So many of these seconds pass in a second.
        training_s: The shortest and the longest training. Each device has its own, drawn evenly by
            its logarithm.
        away, day_s: Those of `[simulation]`.
        dropping: The probability that a device that has got work sends nothing.
        silent_s: How long it then does nothing: at least and at most.
        seed: Decides when a device is away, how long it trains, and when it drops out.
    """

    speed: float
    training_s: tuple[float, float]
    away: float = 0.0
    day_s: float = 86400.0
    dropping: float = 0.0
    silent_s: tuple[float, float] = (0.0, 0.0)
    seed: int = 0


class Round(NamedTuple):
    """A round that has ended, at a time in seconds since 1970. Round 0 is before any training."""

    number: int
    ended: float
    accuracy: float
    updates: int


class Coordinator:
    """A coordinator in a process of its own, which writes the file `log` beside its own file.

    `serve` must be a function of a module.
    """

    def __init__(self, file: Path, serve: Serve, speed: float) -> None:
        self.log = file.parent / "log"
        self._start = file, serve, speed
        self._process: BaseProcess | None = None

    def start(self) -> None:
        """Start it, for the first time or after a kill."""
        file, serve, speed = self._start
        self._process = warm_context().Process(target=served, args=(file, serve, speed, self.log))
        self._process.start()

    def kill(self) -> None:
        """Kill it as `kill -9` does."""
        assert self._process is not None
        self._process.kill()
        self._process.join()

    @property
    def ended(self) -> int:
        """The number of the last round that has ended; -1 before round 0."""
        return max((one.number for one in self.rounds()), default=-1)

    def rounds(self) -> list[Round]:
        """The rounds that have ended, as the log shows them.

        A round is missing if the coordinator was killed just before it logged its end.
        """
        said = self.log.read_text() if self.log.exists() else ""
        return [
            Round(int(number), float(ended), float(accuracy), int(updates))
            for ended, number, accuracy, updates in ROUND.findall(said)
        ]


@contextmanager
def running(file: Path, serve: Serve, speed: float) -> Iterator[Coordinator]:
    """A coordinator that has been started."""
    coordinator = Coordinator(file, serve, speed)
    coordinator.start()
    try:
        yield coordinator
    finally:
        coordinator.kill()


def served(file: Path, serve: Serve, speed: float, log: Path) -> None:
    """Serve in this process, with times that are `speed` times as short."""
    for module, names in TIMES.items():
        there = importlib.import_module(module)
        for name in names:
            setattr(there, name, getattr(there, name) / speed)
    os.chdir(file.parent)
    sys.path.insert(0, str(file.parent))
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(message)s", filename=log)
    serve(file)


@dataclass
class DiurnalFleet:
    """The devices with these `secrets`. They take part until the rounds are over.

    Attributes:
        url: The address of the coordinator.
        secrets: The secrets of the devices.
        habits: How they behave.
        train: Makes the update of a device.
        counts: How many updates were `sent`, `refused` or `dropped`, and how many connections
            `failed`.
        begun: When the fleet begins, in seconds of the monotonic clock.
        is_over: Whether the devices give up, as `asyncio.wait_for` may lose their cancellation.
    """

    url: str
    secrets: Sequence[str]
    habits: Habits
    train: Train
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    def __post_init__(self) -> None:
        habits, devices = self.habits, len(self.secrets)
        self._draw = random.Random(habits.seed)
        shortest, longest = habits.training_s
        self.seconds = [
            shortest * (longest / shortest) ** self._draw.random() for _ in range(devices)
        ]
        self.absence = Absence.drawn(habits.away, habits.day_s, devices, habits.seed)
        self._links: dict[int, Link] = {}
        self.begun = time.monotonic()

    def now(self) -> float:
        """Seconds of the fleet since it began."""
        return (time.monotonic() - self.begun) * self.habits.speed

    async def run(self) -> None:
        """Let every device take part until the rounds are over."""
        async with asyncio.TaskGroup() as group:
            for number in range(len(self.secrets)):
                group.create_task(self._device(number))

    async def _until(self, when: float) -> None:
        await asyncio.sleep(max(when - self.now(), 0) / self.habits.speed)

    async def _device(self, number: int) -> None:
        await asyncio.sleep(number * RETRY_S / len(self.secrets))
        while True:
            await self._until(self.absence.returns(number, self.now()))
            _, body = await self._ask(number, "GET", "/work")
            work = json.loads(body)
            if work.get("state") == "finished":
                self._links.pop(number).writer.close()
                return
            if work.get("state") == "train":
                await self._take_part(number, work)
            else:
                await asyncio.sleep(work.get("ask_again_s", RETRY_S))

    async def _take_part(self, number: int, work: dict[str, Any]) -> None:
        """Train the work of a round, and send the update unless the device drops out."""
        files = {}
        for offer in work["files"]:
            if offer["name"] in (MANIFEST, WEIGHTS):
                status, data = await self._ask(number, "GET", f"/files/{offer['sha256']}")
                if status != 200:  # the round is over
                    return
                files[offer["name"]] = data
        if self._draw.random() < self.habits.dropping:
            self.counts["dropped"] += 1
            await self._until(self.now() + self._draw.uniform(*self.habits.silent_s))
            return
        start = self.now()
        tensors, record = self.train(number, files[WEIGHTS], files[MANIFEST])
        await self._until(self.absence.ready(number, start, self.seconds[number]))
        at = f"/rounds/{work['round']}"
        for method, path, body in (
            ("PUT", f"{at}/tensors/{fingerprint(tensors).sha256}", tensors),
            ("POST", f"{at}/update", record),
        ):
            status, answer = await self._ask(number, method, path, body)
            if status == 409:
                self.counts["refused"] += 1
                return
            assert status < 300, answer
        self.counts["sent"] += 1

    async def _ask(
        self, number: int, method: str, path: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        """Send a request until an answer comes, as an agent does. 503 is none."""
        while not self.is_over:
            try:
                if number not in self._links:
                    address = urlsplit(self.url)
                    opened = await asyncio.open_connection(address.hostname, address.port)
                    self._links[number] = Link(*opened, address.netloc, self.secrets[number])
                status, answer = await self._links[number].ask(method, path, body)
                if status != 503:
                    return status, answer
            except (asyncio.IncompleteReadError, OSError, TimeoutError):
                self.counts["failed"] += 1
                self._links.pop(number, None)
            await asyncio.sleep(RETRY_S)
        raise asyncio.CancelledError
