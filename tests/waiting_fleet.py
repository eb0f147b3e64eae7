"""Thousands of devices that wait for a round: what their polls cost, and when they learn of it.

The devices are enrolled in the state folder before `edgetailor serve` starts on it. From then on
each is a real connection that sends what an agent sends, when the coordinator says.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from safetensors.numpy import save

from device_agent.federation.polling import jittered
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import Manifest, encode, uploaded
from device_agent.formats.protocol.problems import API
from device_agent.formats.update import UpdateRecord
from toolkit.coordinator.database.device_registry import hashed
from toolkit.coordinator.database.key_log import KEY
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey
from toolkit.coordinator.storage.coordinator_store import Store
from vector_fleet import MACHINE

TIMEOUT_S, RETRY_S = 60.0, 5.0


def enrolled(state: Path, devices: int) -> list[str]:
    """Enrol `devices` devices of the kind `device` in a new state folder; returns their secrets."""
    given = [secrets.token_urlsafe(32) for _ in range(devices)]
    store = Store(state)
    # `serve` makes no new key for a federation that devices have joined.
    (state / KEY).write_bytes(CoordinatorKey().pem())
    with store._database.transaction() as db:
        db.executemany(
            "INSERT INTO devices (id, kind, name, secret, public_key, machine) "
            "VALUES (?, 'device', ?, ?, ?, ?)",
            [
                (f"device-{n}", f"device {n}", hashed(secret), f"key {n}", json.dumps(MACHINE))
                for n, secret in enumerate(given, 1)
            ],
        )
    store.close()
    return given


def update_of(
    tensors: Mapping[str, np.ndarray], manifest_file: bytes, samples: int
) -> tuple[bytes, bytes]:
    """The two files of an update with these tensors, trained from the bundle of this manifest."""
    manifest = msgspec.json.decode(manifest_file, type=Manifest)
    table = uploaded(manifest.tensors)
    data = save({entry.name: tensors[entry.name] for entry in table})
    record = UpdateRecord(
        bundle=fingerprint(manifest_file).sha256,
        base=manifest.base,
        submodel=manifest.submodel,
        samples=samples,
        steps=10,
        loss_first=2.0,
        loss_last=1.0,
        tensors=table,
        file=fingerprint(data),
    )
    return data, encode(record)


@dataclass(frozen=True)
class Link:
    """The connection of one device, which sends and receives whole messages."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: str
    secret: str

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send one request. Returns the status and the body of the answer."""
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        self.writer.write(
            f"{method} {API}{path} HTTP/1.1\r\nHost: {self.host}\r\nAccept-Encoding: identity\r\n"
            f"Authorization: Bearer {self.secret}\r\nUser-Agent: edgetailor-agent\r\n"
            f"Content-Type: application/json\r\n{length}\r\n".encode()
            + body
        )
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
        size = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        return int(head.split()[1]), await self.reader.readexactly(int(size or 0))


Train = Callable[[Link, dict[str, Any]], Awaitable[None]]
"""Trains the work that a device has got, and sends the update."""


@dataclass
class Waiting:
    """Devices that wait at the coordinator at `url`.

    Attributes:
        train: What a device does with work, before it waits again. None if it then ends.
        polls: How many answers came.
        connections: How many connections were made.
        learned: When each device was given work, in seconds of the monotonic clock.
    """

    url: str
    secrets: list[str]
    train: Train | None = None
    polls: int = 0
    connections: int = 0
    learned: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """Let every device ask until it has work."""
        async with asyncio.TaskGroup() as group:
            for number, secret in enumerate(self.secrets):
                # Within the first ten seconds, as after a restart of the coordinator.
                group.create_task(self._device(secret, 10 * number / len(self.secrets)))

    async def _device(self, secret: str, begins: float) -> None:
        address = urlsplit(self.url)
        await asyncio.sleep(begins)
        link: Link | None = None
        while True:
            try:
                if link is not None and link.reader.at_eof():
                    link.writer.close()
                    link = None
                if link is None:
                    opened = await asyncio.open_connection(address.hostname, address.port)
                    link = Link(*opened, address.netloc, secret)
                    self.connections += 1
                _, body = await link.ask("GET", "/work")
            except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                if link is not None:
                    link.writer.close()
                link = None
                continue
            answer = json.loads(body)
            if "state" not in answer:  # the coordinator is starting
                await asyncio.sleep(jittered(RETRY_S))
                continue
            self.polls += 1
            if answer["state"] == "train":
                self.learned.append(time.monotonic())
                if self.train is None:
                    link.writer.close()
                    return
                await self.train(link, answer)
            elif answer["state"] == "finished":
                link.writer.close()
                return
            else:
                await asyncio.sleep(jittered(answer["ask_again_s"]))
