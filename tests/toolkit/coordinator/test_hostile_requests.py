"""Requests as nobody should send them, over raw sockets: refused, and nobody else notices."""

import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from http.client import HTTPConnection
from typing import Self

import pytest

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.fleet_status import lines
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.federation.membership import join
from toolkit.coordinator.http import admission, connection_limits, request_limits
from toolkit.coordinator.http.admission import BODY_LIMIT
from toolkit.coordinator.server import Server
from vector_fleet import MACHINE, assert_soon, configured, running, token

JSON = "application/json"


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, told: list[str]) -> Iterator[Server]:
    with running(configured(tmp_path_factory.mktemp("c")), say=told.append) as started:
        assert_soon(lambda: bool(told))  # of round 0; from here on only requests make it say more
        yield started


@pytest.fixture(scope="module")
def secret(server: Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the one device that is let in."""
    folder = tmp_path_factory.mktemp("a")
    return join(server.url, token(server.config, "desktop"), "desk", folder / "state").secret


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)


def answered(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of an answer; 0 where the connection was closed without one."""
    with connection, connection.makefile("rb") as reader:
        try:
            line = reader.readline().split()
            length = 0
            while line and (header := reader.readline().strip()):
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            return (int(line[1]), reader.read(length)) if line else (0, b"")
        except ConnectionResetError:
            return 0, b""


def head(method: str, path: str, bearer: str, *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {bearer}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def ask(
    server: Server, method: str, path: str, bearer: str, body: bytes, kind: str = JSON
) -> tuple[int, dict[str, str]]:
    connection = connected(server)
    connection.sendall(
        head(method, path, bearer, f"Content-Type: {kind}", f"Content-Length: {len(body)}")
    )
    connection.sendall(body)
    status, data = answered(connection)
    return status, json.loads(data) if data else {}


def request_body(server: Server, **change: object) -> bytes:
    request = DeviceKey.new().join_request(token(server.config, "board"), "desk", MACHINE)
    return json.dumps(asdict(request) | change).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'{"name":"\xff"}', b'{"name":1e999}', b'{"name":NaN}',
        b"[" * 100_000, b'{"a":' * 100_000, b'{"timestamp":' + b"9" * 5000 + b"}",
        '{"name":"x"}'.encode("utf-16"), b'{"name":"a","name":"b"}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(server: Server, told: list[str], body: bytes) -> None:
    status, problem = ask(server, "POST", "/v1/devices", token(server.config, "board"), body)
    assert (status, problem["code"]) == (422, "client.bad-request")
    assert not any("fault" in line for line in told)


REPORT = {"submodel": "full", "failures": 1, "reason": "x"}
PAUSE = {"state": "paused", "loss": 1.5, "note": "x"}


@pytest.mark.parametrize(
    ("path", "message", "change"),
    [
        ("problems", REPORT, {"failures": -1}),
        ("problems", REPORT, {"failures": 2**53}),
        ("problems", REPORT, {"failures": 1.5}),
        ("problems", REPORT, {"reason": None}),
        ("progress", PAUSE, {"loss": "1"}),
        ("progress", PAUSE, {"loss": True}),
        ("progress", PAUSE, {"state": "gone"}),
    ],
)
def test_values_that_no_device_sends(
    server: Server, secret: str, path: str, message: dict[str, object], change: dict[str, object]
) -> None:
    body = json.dumps(message | change).encode()
    status, problem = ask(server, "POST", f"/v1/{path}", secret, body)
    assert (status, problem["code"]) == (422, "client.bad-request")


@pytest.mark.parametrize(("path", "message"), [("problems", REPORT), ("progress", PAUSE)])
def test_keys_that_repeat(
    server: Server, secret: str, path: str, message: dict[str, object]
) -> None:
    """Readers differ in which of the two counts, so none does."""
    for key, value in message.items():
        body = json.dumps(message)[:-1] + f", {json.dumps(key)}: {json.dumps(value)}}}"
        status, problem = ask(server, "POST", f"/v1/{path}", secret, body.encode())
        assert (status, problem["code"]) == (422, "client.bad-request")
        assert f"it has the key {key!r} twice" in problem["message"]
    said = '{"state": "paused", "loss": 1e999}'
    assert ask(server, "POST", "/v1/progress", secret, said.encode())[0] == 422


@pytest.mark.parametrize("kind", ["text/xml", "application/x-www-form-urlencoded", "", "a" * 9999])
def test_other_content_types(server: Server, kind: str) -> None:
    bearer, body = token(server.config, "board"), request_body(server)
    status, problem = ask(server, "POST", "/v1/devices", bearer, body, kind)
    assert (status, problem["code"]) == (422, "client.bad-request")


HALF = "\ud800"  # of a surrogate pair, which JSON can say and UTF-8 cannot


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"name": HALF}, "client.bad-request"),
        ({"public_key": HALF}, "client.bad-request"),
        ({"machine": MACHINE | {"system": HALF}}, "client.bad-request"),
        ({"profile": {"title": HALF}}, "client.bad-request"),
        ({"public_key": "é" * 44}, "join.bad-key"),
        ({"public_key": "A" * 100_000}, "join.bad-key"),
        ({"signature": "é"}, "join.bad-signature"),
        ({"signature": "A" * 100_000}, "join.bad-signature"),
        ({"name": "a\u0000b"}, "join.bad-name"),
        ({"name": "a\u202eb"}, "join.bad-name"),
        ({"name": "a\nSet-Cookie: b"}, "join.bad-name"),
        ({"timestamp": 2**53 - 1}, "join.bad-signature"),
        ({"timestamp": 10**30}, "client.bad-request"),
        ({"timestamp": -1}, "client.bad-request"),
        ({"machine": None}, "client.bad-request"),
        ({"machine": {"a": {"b": 1}}}, "client.bad-request"),
        ({"profile": []}, "client.bad-request"),
    ],
)
def test_joins_that_cannot_be(
    server: Server, told: list[str], change: dict[str, object], code: str
) -> None:
    body, bearer = request_body(server, **change), token(server.config, "board")
    status, problem = ask(server, "POST", "/v1/devices", bearer, body)
    assert (status in (403, 422), problem["code"]) == (True, code)
    assert {d.device for d in server.coordinator.status().devices} <= {"desktop-1"}
    assert not any("fault" in line for line in told)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/files/../../state.sqlite3", 404),
        ("/v1/files/%2e%2e%2fstate.sqlite3", 404),
        ("/v1/files/%00", 404),
        ("/v1/files/%ff%fe", 404),
        ("/v1/files/%0d%0aSet-Cookie:%20a=b", 404),
        (f"/v1/files/{'a' * 60_000}", 404),
    ],
)
def test_paths_lead_nowhere_else(server: Server, secret: str, path: str, status: int) -> None:
    connection = connected(server)
    connection.sendall(head("GET", path, secret))
    with connection:
        answer = connection.recv(1 << 16)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"\r\nset-cookie" not in answer.lower()


@pytest.mark.parametrize("round_", ["-1", "one", "9" * 30, "9" * 5000, "1.5", "%00"])
def test_rounds_that_are_none(server: Server, secret: str, round_: str) -> None:
    for method, what in (("PUT", f"tensors/{64 * '0'}"), ("POST", "update")):
        status, _ = ask(server, method, f"/v1/rounds/{round_}/{what}", secret, b"{}")
        assert status in (409, 422)


@pytest.mark.parametrize(
    "head_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000,
        b"POST /v1/devices HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/devices HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http(server: Server, told: list[str], head_: bytes) -> None:
    before = list(told)
    connection = connected(server)
    connection.sendall(head_)
    assert answered(connection)[0] in (0, 400)
    assert told == before


def test_what_devices_say_reaches_no_terminal_raw(server: Server, secret: str) -> None:
    body = json.dumps({"state": "paused", "note": "\x1b[2J\x07hot\u202e " + "x" * 10_000})
    assert ask(server, "POST", "/v1/progress", secret, body.encode())[0] == 204
    status = CoordinatorClient(server.url, secret).status()
    assert (status.devices[0].note or "")[:10] == "[2J hot xx"
    assert len(status.devices[0].note or "") == 200
    assert all(line.isprintable() for line in lines(status))
    for path, kind in (("progress", "state"), ("problems", "submodel")):
        said = json.dumps({kind: "paused", "failures": 1, "note": HALF, "reason": HALF})
        assert ask(server, "POST", f"/v1/{path}", secret, said.encode())[0] == 422
    assert CoordinatorClient(server.url, secret).status() is not None


def chunks(size: int) -> Iterable[bytes]:
    for _ in range(size >> 16):
        yield b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    yield b"0\r\n\r\n"


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_body_that_does_not_end_is_cut_off(
    server: Server, secret: str, announced: bool, known: bool
) -> None:
    size = 16 * BODY_LIMIT
    length = f"Content-Length: {size}" if announced else "Transfer-Encoding: chunked"
    connection, sent = connected(server), 0
    connection.sendall(head("POST", "/v1/progress", secret if known else "nobody", length))
    try:
        for piece in chunks(size):
            connection.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    # 0: the kernel drops an answer that is not read in time
    assert answered(connection)[0] in (0, 413 if known else 401)
    assert sent < size / 2


def test_all_bodies_together_are_bounded(
    server: Server, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "ALL_BODIES", 100_000)
    monkeypatch.setattr(admission, "DISCARDED_S", 0.2)
    held = [connected(server) for _ in range(3)]
    for connection in held:
        connection.sendall(
            head("POST", "/v1/progress", secret, "Content-Length: 60000") + bytes(40_000)
        )
    assert answered(held[2])[0] == 503  # the others may still come to their end
    for connection in held[:2]:
        connection.close()

    def others_are_served() -> bool:
        connection = connected(server)
        connection.sendall(
            head("POST", "/v1/progress", secret, "Content-Length: 90000") + bytes(90_000)
        )
        return answered(connection)[0] == 422

    assert_soon(others_are_served)


def test_nothing_of_a_strangers_body_is_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by the headers alone, whatever is announced and whether it comes or not."""
    monkeypatch.setattr(request_limits, "ALL_BODIES", 0)
    monkeypatch.setattr(admission, "DISCARDED_S", 0.2)
    for body, kept in ((b"", False), (bytes(300), True), (bytes(40), False), (bytes(1), False)):
        for method, path, refusal in (
            ("POST", "/v1/devices", 403),
            ("POST", "/v1/rounds/1/update", 401),
            ("PUT", f"/v1/rounds/1/tensors/{64 * '0'}", 401),
            ("POST", "/v1/no-such-route", 401),
        ):
            connection = connected(server)
            connection.sendall(head(method, path, "nobody", "Content-Length: 300") + body)
            with connection.makefile("rb") as reader:
                assert int(reader.readline().split()[1]) == refusal
                headers = b"".join(iter(reader.readline, b"\r\n")).lower()
                assert (b"connection: close" not in headers) == kept
            connection.close()
    monkeypatch.setattr(request_limits, "ALL_BODIES", 1000)
    assert_soon(lambda: ask(server, "POST", "/docs", "", bytes(300))[0] == 405)


def test_a_body_that_comes_byte_by_byte(
    server: Server, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time; the whole would take hours."""
    monkeypatch.setattr(request_limits, "BODY_S", 0.6)
    monkeypatch.setattr(admission, "DISCARDED_S", 0.2)
    device = server.coordinator.member_with(secret)
    assert device is not None

    class Received:
        limit = 10**6

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *about: object) -> None:
            ended.set()

        def write(self, piece: bytes) -> bool:
            return True

    ended = threading.Event()
    monkeypatch.setattr(server.coordinator, "open_upload", lambda *about: Received())
    for method, path in (("POST", "/v1/progress"), ("PUT", f"/v1/rounds/1/tensors/{64 * '0'}")):
        connection = connected(server)
        connection.sendall(head(method, path, secret, "Content-Length: 9999"))
        connection.settimeout(0.1)
        sent, answer = 0, b""
        while not answer:
            assert sent < 200
            connection.sendall(b"x")
            sent += 1
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")
        connection.close()
    assert ended.wait(10)


def test_a_body_that_does_not_come(
    server: Server, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "BODY_S", 0.3)
    monkeypatch.setattr(admission, "DISCARDED_S", 0.2)
    for method, path in (("POST", "/v1/progress"), ("PUT", f"/v1/rounds/0/tensors/{64 * '0'}")):
        connection = connected(server)
        connection.sendall(head(method, path, secret, "Content-Length: 9") + b"{")
        status, problem = answered(connection)
        assert (status, json.loads(problem)["code"]) in (
            (408, "client.cut-off"),
            (409, "round.closed"),
        )


def test_headers_that_do_not_come(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "HEADERS_S", 0.3)
    for begun in (b"", b"GET / HTTP/1.1\r\nHost:"):
        connection = connected(server)
        connection.sendall(begun)
        assert answered(connection) == (0, b"")
    kept = HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    for _ in range(3):  # a connection that says nothing between two requests is no such thing
        kept.request("GET", "/v1/work")
        assert kept.getresponse().read()
        time.sleep(0.5)
        assert kept.sock is not None
    kept.sock.sendall(b"GET / HTTP/1.1\r\nHost:")
    assert answered(kept.sock) == (0, b"")


def test_thousands_of_connections(
    server: Server, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.opened, "most", lambda: 300)
    monkeypatch.setattr(connection_limits, "HEADERS_S", 1.0)
    held = [connected(server) for _ in range(2000)]
    try:
        status = CoordinatorClient(server.url, secret, patience_s=30).status()
        assert status.devices
    finally:
        for connection in held:
            connection.close()


def test_answers_wait_for_no_acknowledgement(server: Server, secret: str) -> None:
    kept = HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    times = []
    for _ in range(40):
        start = time.monotonic()
        kept.request("GET", "/v1/work", headers={"Authorization": f"Bearer {secret}"})
        assert kept.getresponse().read()
        times.append(time.monotonic() - start)
    kept.close()
    # It delays them by 40 ms, if not those of a connection that has just been made.
    assert min(times[20:]) < 0.03
