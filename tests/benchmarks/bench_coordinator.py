"""What a request costs the coordinator with more and more devices, and how long closing blocks it.

`edgetailor serve` runs for fleets of the sizes FLEETS at the same time, and their requests take
turns. Devices have Ed25519 keys and send distinct valid updates. Processor time is that of the
serving process. Uploads of a larger model take turns with those to a bare Starlette route that only
streams to a file. Thousands of devices wait for the first round, each with a connection of its own.
Meanwhile the operator loads pages. In another fleet of this size, each round selects 200 devices.
Linux only. Run `make bench-coordinator`.
"""

import argparse
import asyncio
import http.client
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
from safetensors.numpy import load

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import MANIFEST, WEIGHTS
from device_agent.formats.protocol.problems import API
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.signed_work import split_token
from operator_pages import log_in
from toolkit.coordinator.http.connection_limits import raise_descriptor_limit
from vector_fleet import MACHINE
from waiting_fleet import Link, Waiting, enrolled, update_of

FLEETS = (200, 1000, 2000)
BLOCKS = 6
"""Turns of each kind of request."""
POLLS, TRANSFERS = 200, 30
"""Requests of a turn; all transfers together must be fewer than the devices of the least fleet."""
UPLOADS = 7
"""Turns of the uploads of the larger model."""
WAITING = 10_000
MEASURED_S = 30.0
"""How long the processor time of a fleet that waits is measured, after all have asked once."""
SELECTED, SELECTING_ROUNDS = 200, 3
GOAL_RATIO, GOAL_SHARE, GOAL_POLL_S = 1.3, 0.7, 1.0
GOAL_WAITING, GOAL_LEARNS_S = 0.2, 10.0
NETS = """
from torch import nn

def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

def large():
    return nn.Sequential(nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 10))
"""
CONFIG = """
{keys}
model = "nets:{model}"
input_shape = [{inputs}]
held_out = "held_out.npz"
port = 0
deadline_s = 86400.0

[[devices]]
name = "device"
submodel = "full"
count = {devices}
"""
BARE = """
import sys, tempfile, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

async def put(request):
    with tempfile.TemporaryFile(dir=".") as file:
        async for piece in request.stream():
            file.write(piece)
    return Response(status_code=204)

app = Starlette(routes=[Route("/", put, methods=["PUT"])])
uvicorn.run(app, port=int(sys.argv[1]), log_level="critical")
"""


@dataclass
class Serving:
    """A serving process and the links of its devices."""

    process: int
    url: str
    folder: Path
    links: list[CoordinatorClient] = field(default_factory=list)
    connection: http.client.HTTPConnection | None = None

    def processor_s(self) -> float:
        """Processor time of the process so far, in seconds: its own and that of the system."""
        return sum(self.own_and_system_s())

    def own_and_system_s(self) -> tuple[float, float]:
        """Processor time in the process itself, and in the system for it."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        return int(fields[11]) / ticks, int(fields[12]) / ticks

    def forget_peak(self) -> int:
        """Let `peak_bytes` begin with the present resident memory, which this returns."""
        Path(f"/proc/{self.process}/clear_refs").write_text("5")
        return self.peak_bytes()

    def peak_bytes(self) -> int:
        """Peak resident memory of the process."""
        lines = Path(f"/proc/{self.process}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    def ask(
        self, method: str, path: str, secret: str, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """One request on the connection that all devices of this benchmark share."""
        if self.connection is None:
            self.connection = http.client.HTTPConnection(urlsplit(self.url).netloc)
        headers = {"Authorization": f"Bearer {secret}"}
        self.connection.request(method, f"{API}{path}", body, headers)
        answer = self.connection.getresponse()
        return answer.status, answer.read()


def noisy_update(
    weights: dict[str, np.ndarray], manifest_file: bytes, number: int
) -> tuple[bytes, bytes]:
    """The two files of an update whose tensors are `weights` with noise that `number` decides."""
    draw = np.random.default_rng(number)
    tensors = {
        name: value + draw.normal(0, 1e-3, value.shape).astype(np.float32)
        for name, value in weights.items()
    }
    return update_of(tensors, manifest_file, 100 + number % 50)


@dataclass
class Fleet:
    """A federation of `size` devices, whose next one to send an update is `next`."""

    size: int
    serving: Serving
    secrets: list[str] = field(default_factory=list)
    next: int = 0
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    manifest: bytes = b""

    def join(self) -> None:
        """Enrol all devices, and read the bundle that they are offered."""
        path = self.serving.folder / "state" / "tokens" / "device.token"
        token, _ = split_token(path.read_text().strip())
        with ThreadPoolExecutor(4) as pool:
            self.secrets = list(pool.map(lambda n: self._join(token, n), range(self.size)))
        work = self.work()
        while work.state != "train":
            time.sleep(0.2)
            work = self.work()
        files = {offer.name: offer.sha256 for offer in work.files}
        self.weights = load(self.fetch(files[WEIGHTS]))
        self.weights_file = files[WEIGHTS]
        self.manifest = self.fetch(files[MANIFEST])

    def _join(self, token: str, number: int) -> str:
        link = CoordinatorClient(self.serving.url, token, patience_s=60)
        key = DeviceKey.new()
        reply = link.join(lambda: key.join_request(token, f"device {number}", MACHINE))
        return reply.secret

    def work(self, number: int = 0) -> Work:
        """What a device should do."""
        status, body = self.serving.ask("GET", "/work", self.secrets[number])
        assert status == 200, body
        return msgspec.json.decode(body, type=Work)

    def fetch(self, sha256: str, number: int = 0) -> bytes:
        """A file of the bundle."""
        status, body = self.serving.ask("GET", f"/files/{sha256}", self.secrets[number])
        assert status == 200, body
        return body

    def update(self, number: int) -> tuple[bytes, bytes]:
        """The two files of the update of one device."""
        return noisy_update(self.weights, self.manifest, number)

    def send(self, number: int, data: bytes, record: bytes) -> None:
        """Send an update."""
        path = f"/rounds/1/tensors/{fingerprint(data).sha256}"
        for method, at, body in (("PUT", path, data), ("POST", "/rounds/1/update", record)):
            status, answer = self.serving.ask(method, at, self.secrets[number], body)
            assert status < 300, answer


@contextmanager
def process(folder: Path, *command: object) -> Iterator[int]:
    """A process of this Python in `folder`; what it says goes to the file `said`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}
    with (folder / "said").open("wb") as said:
        started = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=folder, env=environment, stdout=said, stderr=said,
        )  # fmt: skip
        try:
            yield started.pid
        finally:
            started.terminate()
            started.wait()


@contextmanager
def serving(
    folder: Path, devices: int, model: str, inputs: int, keys: str = "rounds = 2"
) -> Iterator[Serving]:
    """`edgetailor serve` in the folder `folder`; `keys` are more lines of its file."""
    folder.mkdir(exist_ok=True)
    (folder / "nets.py").write_text(NETS)
    config = CONFIG.format(model=model, inputs=inputs, devices=devices, keys=keys)
    (folder / "fleet.toml").write_text(config)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(256, inputs)).astype(np.float32)
    np.savez(folder / "held_out.npz", x=x, y=draw.integers(10, size=256))
    with process(folder, "-m", "toolkit.cli", "serve", "fleet.toml") as number:
        address = folder / "state" / "address"
        while not address.exists():
            time.sleep(0.2)
            stat = Path(f"/proc/{number}/stat").read_text()
            assert ") Z " not in stat, (folder / "said").read_text()  # it has ended
        yield Serving(number, address.read_text().strip(), folder)


def blocks(fleets: list[Fleet], block: Callable[[Fleet], int]) -> dict[int, float]:
    """Processor milliseconds of the serving process for a request, by size; blocks take turns."""
    milliseconds: dict[int, list[float]] = {fleet.size: [] for fleet in fleets}
    for _ in range(BLOCKS):
        for fleet in fleets:
            before = fleet.serving.processor_s()
            count = block(fleet)
            milliseconds[fleet.size].append((fleet.serving.processor_s() - before) / count * 1e3)
    return {size: statistics.median(values) for size, values in milliseconds.items()}


def poll(fleet: Fleet) -> int:
    """A turn of polls."""
    for number in itertools.islice(itertools.cycle(range(fleet.size)), POLLS):
        fleet.work(number)
    return POLLS


def download(fleet: Fleet) -> int:
    """A turn of downloads of the weights."""
    for number in range(TRANSFERS):
        fleet.fetch(fleet.weights_file, number)
    return TRANSFERS


def upload(fleet: Fleet) -> int:
    """A turn of updates, from devices that have not sent one."""
    updates = [(n, *fleet.update(n)) for n in range(fleet.next, fleet.next + TRANSFERS)]
    fleet.next += TRANSFERS
    for update in updates:
        fleet.send(*update)
    return TRANSFERS


def longest_poll(fleet: Fleet) -> tuple[float, float]:
    """Seconds of the longest poll while round 1 closes and round 2 opens, and how long that is."""
    for number in range(fleet.next, fleet.size - 1):
        fleet.send(number, *fleet.update(number))
    waits: list[float] = []
    done = threading.Event()

    def polls(number: int) -> None:
        own = Serving(fleet.serving.process, fleet.serving.url, fleet.serving.folder)
        while not done.is_set():
            start = time.perf_counter()
            status, body = own.ask("GET", "/work", fleet.secrets[number])
            waits.append(time.perf_counter() - start)
            assert status == 200, body
            if msgspec.json.decode(body, type=Work).round == 2:
                done.set()

    last = fleet.size - 1
    update = fleet.update(last)
    with ThreadPoolExecutor(4) as pool:
        polling = [pool.submit(polls, number) for number in range(4)]
        start = time.perf_counter()
        fleet.send(last, *update)
        for poll_result in polling:
            poll_result.result()
        took = time.perf_counter() - start
    return max(waits), took


def throughput(scratch: Path) -> None:
    """Print what uploads of 67 MB cost the coordinator and a bare route, which take turns."""
    print()
    with ExitStack() as stack:
        server = stack.enter_context(serving(scratch / "large", 1, "large", 4096))
        fleet = Fleet(1, server)
        fleet.join()
        bare = scratch / "bare"
        bare.mkdir()
        (bare / "app.py").write_text(BARE)
        port = int(urlsplit(server.url).port or 0) + 1
        bare_process = stack.enter_context(process(bare, "app.py", port))
        links = {
            "coordinator": (server, urlsplit(server.url).netloc),
            "bare": (Serving(bare_process, "", bare), f"127.0.0.1:{port}"),
        }
        times: dict[str, list[float]] = {name: [] for name in links}
        used: dict[str, list[float]] = {name: [] for name in links}
        for number in range(UPLOADS):
            data, _ = fleet.update(number)
            path = f"{API}/rounds/1/tensors/{fingerprint(data).sha256}"
            for name, (server, netloc) in links.items():
                headers = {"Authorization": f"Bearer {fleet.secrets[0]}"}
                link = http.client.HTTPConnection(netloc)
                link.connect()
                before, start = server.processor_s(), time.perf_counter()
                link.request("PUT", path if name == "coordinator" else "/", data, headers)
                answer = link.getresponse()
                assert answer.status == 204, answer.read()
                times[name].append(time.perf_counter() - start)
                used[name].append(server.processor_s() - before)
                link.close()
        for name in links:
            rate = len(data) / statistics.median(times[name]) / 1e6
            print(f"{name}: {rate:.0f} MB/s, {statistics.median(used[name]):.2f} s of processor")
        share = statistics.median(times["bare"]) / statistics.median(times["coordinator"])
        print(f"{share:.2f} of the bare route's throughput (goal {GOAL_SHARE})")


async def wait(scratch: Path, devices: int) -> None:
    """Print what `devices` devices that wait cost, and how long they take to learn of a round."""
    folder = scratch / "waiting"
    secrets = enrolled(folder / "state", devices)
    with serving(folder, devices + 1, "small", 64) as server:
        fleet, waiting = Fleet(1, server), Waiting(server.url, secrets)
        running = asyncio.create_task(waiting.run())
        while waiting.polls < 3 * devices:
            await asyncio.sleep(0.5)
        before, begun, polls = server.own_and_system_s(), time.monotonic(), waiting.polls
        connections = waiting.connections
        await asyncio.sleep(MEASURED_S)
        took = time.monotonic() - begun
        now = server.own_and_system_s()
        own, system = now[0] - before[0], now[1] - before[1]
        used, polls = own + system, waiting.polls - polls
        print(f"\n{devices:,} devices wait: {used / took:.3f} of a core (goal {GOAL_WAITING}), "
              f"{system / used:.0%} of it in the system, load {os.getloadavg()[0]:.1f}, "
              f"{polls / took:.0f} polls a second, {used / polls * 1e3:.3f} ms each, "
              f"{(waiting.connections - connections) / took:.1f} new connections a second, "
              f"peak {server.peak_bytes() / 1e6:.0f} MB")  # fmt: skip
        await asyncio.to_thread(load_pages, server)
        await asyncio.to_thread(fleet.join)  # the last one: the round opens
        await running
        learned = sorted(learned_s - waiting.learned[0] for learned_s in waiting.learned)
        print(f"they learn of the round within {learned[-1]:.1f} s of one another, half of them "
              f"within {learned[len(learned) // 2]:.1f} s (goal {GOAL_LEARNS_S:.0f})")  # fmt: skip


def load_pages(server: Serving, times: int = 10) -> None:
    """Print what the operator's status and pages take: time, size, and the server's memory."""
    token = (server.folder / "state" / "operator.token").read_text().strip()
    pages = ("", "devices", "devices?search=device-99&sort=trained&descending=true")
    with httpx.Client(base_url=server.url, timeout=60) as browser:
        log_in(browser, token)
        bearer = {"Authorization": f"Bearer {token}"}
        for path in (f"{API}/status", *(f"/operator/{page}" for page in pages)):
            took, before = [], server.forget_peak()
            for _ in range(times):
                begun = time.perf_counter()
                headers = bearer if path.startswith(API) else {}
                answer = browser.get(path, headers=headers).raise_for_status()
                took.append(time.perf_counter() - begun)
            print(f"{path}: {statistics.median(took) * 1e3:.0f} ms, "
                  f"{len(answer.content) / 1e3:.1f} kB (goals 1000 ms, 200 kB), "
                  f"memory + {(server.peak_bytes() - before) / 1e6:.1f} MB")  # fmt: skip


@dataclass
class Selected:
    """What selected devices do: they download their bundles, and send once they may."""

    may_send: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0
    refused: int = 0

    async def train(self, link: Link, work: dict[str, Any]) -> None:
        """Take part in one round."""
        files = {}
        for offer in work["files"]:
            status, files[offer["name"]] = await link.ask("GET", f"/files/{offer['sha256']}")
            if status != 200:  # the round is over
                return
        await self.may_send.wait()
        self.sent += 1
        data, record = noisy_update(load(files[WEIGHTS]), files[MANIFEST], self.sent)
        round_ = f"/rounds/{work['round']}"
        for method, path, body in (
            ("PUT", f"{round_}/tensors/{fingerprint(data).sha256}", data),
            ("POST", f"{round_}/update", record),
        ):
            status, answer = await link.ask(method, path, body)
            if status == 409:  # it is not needed
                self.refused += 1
                return
            assert status < 300, answer


async def select(scratch: Path, devices: int) -> None:
    """Print what rounds of SELECTED of `devices` devices cost, and the others while they wait."""
    folder, selected = scratch / "selecting", Selected()
    secrets = enrolled(folder / "state", devices)
    keys = f"rounds = {SELECTING_ROUNDS}\nclients_per_round = {SELECTED}"
    with serving(folder, devices, "small", 64, keys) as server:
        waiting = Waiting(server.url, secrets, selected.train)
        running = asyncio.create_task(waiting.run())
        while waiting.polls < 3 * devices or len(waiting.learned) < SELECTED:
            await asyncio.sleep(0.5)
        used, begun = server.processor_s(), time.monotonic()
        await asyncio.sleep(MEASURED_S)
        share = (server.processor_s() - used) / (time.monotonic() - begun)
        asked = len(waiting.learned)
        print(f"\n{devices:,} devices, of which a round has selected {asked}: while all wait, "
              f"{share:.3f} of a core (goal {GOAL_WAITING})")  # fmt: skip
        used, begun = server.processor_s(), time.monotonic()
        selected.may_send.set()
        await running
        took, used = time.monotonic() - begun, server.processor_s() - used
        each, rounds = used / SELECTING_ROUNDS, SELECTING_ROUNDS
        print(f"{rounds} rounds of {SELECTED} updates: {each:.1f} s of processor a round with all "
              f"polls, {took / rounds:.1f} s each, {selected.refused} updates not needed, "
              f"peak {server.peak_bytes() / 1e6:.0f} MB")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, nargs="+", default=list(FLEETS))
    parser.add_argument("--waiting", type=int, default=WAITING)
    parser.add_argument("--only", choices=["requests", "throughput", "waiting", "selection"])
    given = parser.parse_args()
    names = ("uvicorn", "starlette", "fastapi", "h11")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"{versions}")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        if given.only in (None, "requests"):
            requests(Path(scratch), given.fleets, stack)
        if given.only in (None, "throughput"):
            throughput(Path(scratch))
        if given.only in (None, "waiting"):
            raise_descriptor_limit()
            asyncio.run(wait(Path(scratch), given.waiting))
        if given.only in (None, "selection"):
            raise_descriptor_limit()
            asyncio.run(select(Path(scratch), given.waiting))


def requests(scratch: Path, sizes: list[int], stack: ExitStack) -> None:
    """Print the table of requests."""
    fleets = [
        Fleet(size, stack.enter_context(serving(scratch / str(size), size, "small", 64)))
        for size in sizes
    ]
    for fleet in fleets:
        fleet.join()
    columns = {
        "poll, ms": blocks(fleets, poll),
        "download, ms": blocks(fleets, download),
        "update, ms": blocks(fleets, upload),
    }
    closing = {fleet.size: longest_poll(fleet) for fleet in fleets}
    print(f"\n| devices | {' | '.join(columns)} | longest poll, s | closing, s | peak, MB |")
    print("|---|" + "---|" * (len(columns) + 3))
    for fleet in fleets:
        cells = [f"{column[fleet.size]:.2f}" for column in columns.values()]
        slowest, took = closing[fleet.size]
        peak = fleet.serving.peak_bytes() / 1e6
        row = [f"{fleet.size:,}", *cells, f"{slowest:.2f}", f"{took:.1f}", f"{peak:.0f}"]
        print(f"| {' | '.join(row)} |")
    ratios = ", ".join(
        f"{name.partition(',')[0]} {max(column.values()) / min(column.values()):.2f}"
        for name, column in columns.items()
    )
    print(f"\nLargest over smallest: {ratios} (goal {GOAL_RATIO}); "
          f"longest poll below {GOAL_POLL_S:.0f} s: "
          f"{all(slowest < GOAL_POLL_S for slowest, _ in closing.values())}")  # fmt: skip


if __name__ == "__main__":
    main()
