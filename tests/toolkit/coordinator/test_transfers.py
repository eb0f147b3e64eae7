"""Files over connections that break off: what has come is not sent again, in both directions."""

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import urllib3

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.transfers import PART
from device_agent.federation import membership
from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.manifest import WEIGHTS
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.formats.update import RECORD, TENSORS
from faulty_proxy import Fault, proxy
from log_messages import logged
from refusals import refused
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.http.open_connections import MOST_BUSY
from toolkit.coordinator.server import Server
from vector_fleet import (
    CONFIG,
    VectorModel,
    assert_soon,
    configured,
    joined,
    running,
    task,
    token,
    trained,
)

PIECE = 4 << 20
"""Bytes after which connections break off."""
NUMBERS = 5 * PIECE // 4
ALONE = CONFIG[: CONFIG.index("[[devices]]")] + '[[devices]]\nname = "desktop"\nsubmodel = "full"\n'


@dataclass
class Device:
    """A device with an update of the open round, and its secret."""

    server: Server
    config: CoordinatorConfig
    link: CoordinatorClient
    update: Path
    weights: FileOffer

    @property
    def tensors(self) -> Path:
        return self.update / TENSORS

    @property
    def incoming(self) -> list[Path]:
        return list((self.config.state / "incoming").iterdir())

    def finish(self) -> None:
        """Send the rest of the update, and see that it counts."""
        self.link.send_update(1, (self.update / RECORD).read_bytes())
        assert task(self.link).round == 2
        assert self.server.coordinator.status().history[-1].updates == 1


def enrolled(config: CoordinatorConfig, server: Server, folder: Path) -> Device:
    known = membership.join(server.url, token(config, "desktop"), "desk", folder / "0")
    link = CoordinatorClient(server.url, known.secret, patience_s=0)
    work, _, update = trained(link, folder)
    weights = next(offer for offer in work.files if offer.name == WEIGHTS)
    return Device(server, config, link, update, weights)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    config = configured(tmp_path, ALONE)
    with running(config, VectorModel(NUMBERS)) as server:
        yield enrolled(config, server, tmp_path)


def through(url: str, device: Device, come: int = 0) -> tuple[CoordinatorClient, list[float]]:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        # As after a second: what went through has reached the coordinator's disk.
        assert_soon(
            lambda: sum(file.stat().st_size for file in device.incoming) >= come * len(slept)
        )

    secret = device.link._pool.headers["Authorization"].removeprefix("Bearer ")
    return CoordinatorClient(url, secret, sleep=sleep), slept


@pytest.mark.parametrize("reset", [False, True])
def test_a_download_over_connections_that_break_off(
    device: Device, tmp_path: Path, reset: bool
) -> None:
    with proxy(lambda: device.server.url, lambda: Fault(down=PIECE, reset=reset)) as (url, carried):
        link, slept = through(url, device)
        link.download(device.weights, tmp_path / "got" / "w")
    assert fingerprint_file(tmp_path / "got" / "w").sha256 == device.weights.sha256
    assert [path.name for path in (tmp_path / "got").iterdir()] == ["w"]
    assert carried.cut >= 5
    # A reset discards what the device has not read yet.
    assert carried.down <= (1.3 if reset else 1.01) * device.weights.size
    assert set(slept) == {1}  # the waits do not grow while there is progress


def test_an_upload_over_connections_that_break_off(device: Device) -> None:
    size = device.tensors.stat().st_size
    with proxy(lambda: device.server.url, lambda: Fault(up=PIECE)) as (url, carried):
        link, slept = through(url, device, PIECE - 1000)
        link.send_tensors(1, device.tensors)
        assert carried.cut >= 5
        assert carried.up <= 1.01 * size  # nothing that reached the coordinator is sent again
        link.send_tensors(1, device.tensors)  # it has come: nothing is sent again
        assert carried.up <= 1.01 * size
    assert set(slept) == {1}
    assert device.incoming == []
    device.finish()


def test_an_upload_continues_after_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    config = configured(tmp_path, ALONE)
    with running(config, VectorModel(NUMBERS)) as server:
        device = enrolled(config, server, tmp_path)
        with proxy(lambda: server.url, lambda: Fault(up=3 * PIECE)) as (url, _):
            link, _ = through(url, device)
            link._patience_s = 0
            with refused("client.unreachable"):
                link.send_tensors(1, device.tensors)
    (part,) = device.incoming
    missing = device.tensors.stat().st_size - part.stat().st_size
    assert missing < 3 * PIECE
    (config.state / "incoming" / ".0123456789abcdef").write_bytes(b"of a killed process")
    with running(config, VectorModel(NUMBERS)) as server:
        assert device.incoming == [part]
        device.link = joined(server, tmp_path / "0")
        device.server = server
        task(device.link)
        with proxy(lambda: server.url, Fault) as (url, carried):
            link, slept = through(url, device)
            link.send_tensors(1, device.tensors)
        assert missing < carried.up < missing + 2000  # two requests' headers
        assert slept == []
        device.finish()


def test_a_damaged_part_of_an_upload_costs_another_transfer(tmp_path: Path) -> None:
    config = configured(tmp_path, ALONE)
    with running(config) as server:
        device = enrolled(config, server, tmp_path)
    sha256 = fingerprint_file(device.tensors).sha256
    (config.state / "incoming" / f"desktop-1.{sha256}").write_bytes(bytes(1000))
    with running(config) as server, logged() as said:
        device.link, device.server = joined(server, tmp_path / "0"), server
        task(device.link)
        link, slept = through(server.url, device)
        link.send_tensors(1, device.tensors)
        assert slept == [1]
        assert "did not take this part of the upload (upload.altered)" in said[0]
        device.finish()


@pytest.mark.parametrize("size", [1, 3000, 5000, 4072])
def test_a_damaged_part_of_a_download_costs_another_transfer(tmp_path: Path, size: int) -> None:
    config = configured(tmp_path, ALONE)
    with running(config) as server:
        device = enrolled(config, server, tmp_path)
        assert device.weights.size == 4072
        (tmp_path / f"{PART}w").write_bytes(b"?" * size)
        link, slept = through(server.url, device)
        link.download(device.weights, tmp_path / "w")
        assert slept == []
    assert fingerprint_file(tmp_path / "w").sha256 == device.weights.sha256
    assert not (tmp_path / f"{PART}w").exists()


@pytest.mark.parametrize(
    ("headers", "status", "span"),
    [
        ({}, 200, (0, 4072)),
        ({"Range": "bytes=0-"}, 206, (0, 4072)),
        ({"Range": "bytes=4071-"}, 206, (4071, 4072)),
        ({"Range": "bytes=10-19"}, 206, (10, 20)),
        ({"Range": "bytes=10-99999999"}, 206, (10, 4072)),
        ({"Range": "bytes=4072-"}, 416, None),
        ({"Range": "bytes=999999999-"}, 416, None),
        ({"Range": f"bytes={'9' * 40}-"}, 416, None),
        ({"Range": "bytes=4072-5000"}, 416, None),
        ({"Range": "bytes=5000-4999"}, 200, (0, 4072)),
        ({"Range": f"bytes={'9' * 5000}-"}, 200, (0, 4072)),
        ({"Range": "bytes=-5"}, 200, (0, 4072)),
        ({"Range": "bytes=9-5"}, 200, (0, 4072)),
        ({"Range": "bytes=1-2,4-5"}, 200, (0, 4072)),
        ({"Range": "pages=1-"}, 200, (0, 4072)),
        ({"Range": "bytes=10-", "If-Range": "TAG"}, 206, (10, 4072)),
        ({"Range": "bytes=10-", "If-Range": '"other"'}, 200, (0, 4072)),
        ({"Range": "bytes=10-", "If-Range": "Sun, 22 Nov 2026 12:00:00 GMT"}, 200, (0, 4072)),
    ],
)
def test_ranges(
    small: Device, headers: dict[str, str], status: int, span: tuple[int, int] | None
) -> None:
    tag = f'"{small.weights.sha256}"'
    asked = {name: value.replace("TAG", tag) for name, value in headers.items()}
    url = f"{small.server.url}/v1/files/{small.weights.sha256}"
    sent = {**small.link._pool.headers, **asked}
    before = small.server.coordinator.status().devices[0].bytes_down
    answer = urllib3.request("GET", url, headers=sent)
    assert answer.status == status
    if span is None:
        assert answer.headers["Content-Range"] == "bytes */4072"
        return
    whole = (small.config.state / "files" / small.weights.sha256).read_bytes()
    assert (answer.data, answer.headers["ETag"]) == (whole[slice(*span)], tag)
    expected = f"bytes {span[0]}-{span[1] - 1}/4072" if status == 206 else None
    assert answer.headers.get("Content-Range") == expected
    down = small.server.coordinator.status().devices[0].bytes_down
    assert down - before == span[1] - span[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    folder = tmp_path_factory.mktemp("small")
    config = configured(folder, ALONE)
    with running(config) as server:
        yield enrolled(config, server, folder)


def begun(device: Device, sha256: str, offset: int | str, body: bytes, size: int) -> socket.socket:
    """A connection that has sent the beginning of a PUT of `size` bytes."""
    connection = socket.create_connection(("127.0.0.1", int(device.server.url.rpartition(":")[2])))
    connection.settimeout(20)
    head = (
        f"PUT /v1/rounds/1/tensors/{sha256} HTTP/1.1", "Host: x",
        f"Authorization: {device.link._pool.headers['Authorization']}",
        f"Upload-Offset: {offset}", f"Content-Length: {size}", "", "",
    )  # fmt: skip
    connection.sendall("\r\n".join(head).encode() + body)
    return connection


def answer(sending: socket.socket) -> bytes:
    """What comes until the end of a Problem."""
    received = b""
    while not received.endswith(b"}") and (piece := sending.recv(1 << 16)):
        received += piece
    return received


def test_200_uploads_of_one_device_at_a_time(device: Device) -> None:
    connections = []
    for number in range(200):
        sha256 = f"{number:064x}"
        connections.append(begun(device, sha256, 0, bytes(1000), 2000))
        # The last one wins, and there is never a second file.
        while [path.name for path in device.incoming] != [f"desktop-1.{sha256}"]:
            assert len(device.incoming) <= 1
            time.sleep(0.001)
    device.link.send_tensors(1, device.tensors)
    assert device.incoming == []
    # A device has so many requests at a time, and one of them sent the last tensors.
    for connection in connections[1 - MOST_BUSY :]:
        connection.sendall(bytes(1000))
        assert b"upload.superseded" in answer(connection)
    for connection in connections:
        connection.close()
    assert device.incoming == []
    device.finish()


def test_a_part_that_does_not_follow(small: Device) -> None:
    sha256 = "0" * 64
    for offset, body in ((0, b"abc"), (3, b"defg")):
        begun(small, sha256, offset, body, 100).close()
        come = offset + len(body)
        assert_soon(lambda come=come: [p.stat().st_size for p in small.incoming] == [come])  # type: ignore[misc]
    path = f"/rounds/1/tensors/{sha256}"
    assert small.link._ask("GET", path, dict) == {"received": 7, "complete": False}
    for offset in (3, 8):
        with begun(small, sha256, offset, b"x", 1) as sending:
            assert b"upload.other-offset" in answer(sending)
    assert [part.read_bytes() for part in small.incoming] == [b"abcdefg"]
    for text in ("1.0", "-1", "+7", "9" * 5000):
        with begun(small, sha256, text, b"x", 1) as sending:
            assert b"header.upload-offset: " in (found := answer(sending))
            assert len(found) < 1000
    with begun(small, "1" * 64, 7, b"x", 1) as sending:  # of another file
        assert b"upload.other-offset" in answer(sending)
    small.link.leave()
    assert small.incoming == []
