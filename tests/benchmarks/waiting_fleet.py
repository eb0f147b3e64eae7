"""Thousands of devices that wait for a round: what their polls cost, and when they learn of it.

The devices are enrolled in the state folder before `edgetailor serve` starts on it. From then on
each is a real connection that sends what an agent sends, when the coordinator says.
"""

import asyncio
import json
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from device_agent.federation.polling import jittered
from device_agent.formats.protocol.problems import API
from toolkit.coordinator.database.device_registry import hashed
from toolkit.coordinator.devices.coordinator_key import KEY, CoordinatorKey
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


@dataclass
class Waiting:
    """Devices that wait at the coordinator at `url`.

    Attributes:
        polls: How many answers came.
        connections: How many connections were made.
        learned: When each device was given work, in seconds of the monotonic clock.
    """

    url: str
    secrets: list[str]
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
        request = (
            f"GET {API}/work HTTP/1.1\r\nHost: {address.netloc}\r\nAccept-Encoding: identity\r\n"
            f"Authorization: Bearer {secret}\r\nUser-Agent: edgetailor-agent\r\n"
            "Content-Type: application/json\r\n\r\n"
        ).encode()
        await asyncio.sleep(begins)
        reader: asyncio.StreamReader | None = None
        writer: asyncio.StreamWriter | None = None
        while True:
            if reader is None or writer is None or reader.at_eof():
                if writer is not None:
                    writer.close()
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                self.connections += 1
            try:
                writer.write(request)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                answer = json.loads(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                reader = None
                continue
            if "state" not in answer:  # the coordinator is starting
                await asyncio.sleep(jittered(RETRY_S))
                continue
            self.polls += 1
            if answer["state"] == "train":
                self.learned.append(time.monotonic())
                writer.close()
                return
            await asyncio.sleep(jittered(answer["ask_again_s"]))
