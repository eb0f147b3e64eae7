"""Which connections are kept when there are too many: real sockets, and few file descriptors."""

import asyncio
import json
import re
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import forked
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.fleet_status import fleet_status, lines
from device_agent.federation.membership import join
from toolkit.coordinator.http import connection_limits
from toolkit.coordinator.http.certificates import new_certificate
from toolkit.coordinator.http.open_connections import (
    KEEP_ALIVE_S,
    MOST_BUSY,
    SHORTEST_KEEP_ALIVE_S,
    OpenConnections,
    Rank,
    network_of,
)
from toolkit.coordinator.http.repeated_polls import RepeatedPolls
from toolkit.coordinator.minute_log import MinuteLog
from toolkit.coordinator.server import Server
from vector_fleet import (
    CONFIG,
    assert_soon,
    configured,
    running,
    serve_with_few_files,
    token,
)

NOFILE = 400
SILENT = 600
ELSEWHERE = "127.0.0.2"
"""Another address of this machine."""


@contextmanager
def silent(url: str, count: int, address: str) -> Iterator[list[socket.socket]]:
    """Connections from `address` that send nothing."""
    port = int(url.rpartition(":")[2])
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", port), 20, source_address=(address, 0))
            )
            for _ in range(count)
        ]


@pytest.mark.parametrize("address", [ELSEWHERE, "127.0.0.1"])
def test_one_address_locks_nobody_out(tmp_path: Path, address: str) -> None:
    """A device that is connected stays so, and another one comes in, from the same address too."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most[0], SILENT + 200), most[1]))
    ours, theirs = Pipe(duplex=False)
    process = forked(serve_with_few_files, tmp_path, NOFILE, theirs)
    try:
        assert ours.poll(60)
        url, secret = ours.recv()
        member = join(url, secret, "desk", tmp_path / "a").secret
        kept = HTTPConnection(url.removeprefix("http://"), timeout=20)
        headers = {"Authorization": f"Bearer {member}"}

        def poll() -> str:
            kept.request("GET", "/v1/work", headers=headers)
            return str(json.loads(kept.getresponse().read())["state"])

        assert poll() == "wait"
        connected = kept.sock
        with silent(url, SILENT, address):
            join(url, secret, "new", tmp_path / "b")
            status = fleet_status(tmp_path / "b")
            assert poll() == "wait"
        assert kept.sock is connected
        kept.close()
    finally:
        process.terminate()
        process.join()
    assert len(status.devices) == 2
    allowed = NOFILE - connection_limits.RESERVED
    assert status.closed_connections >= SILENT - allowed
    said = [line for line in lines(status) if "because there were too many" in line]
    assert said == [
        f"  closed {status.closed_connections:,} connections, because there were too many"
    ]
    # One line at once; how many more is said a minute later.
    logged = (tmp_path / "log").read_text().splitlines()
    assert [line for line in logged if "too many connections" in line] == [
        f"There are too many connections for the limit of {allowed} open files: closed one from "
        f"{address}. If these are your devices, raise the limit of open files (`ulimit -n`, or "
        "LimitNOFILE of the service)."
    ]


def test_tls_connections_without_a_handshake(tmp_path: Path) -> None:
    new_certificate(tmp_path / "c" / "tls", ["127.0.0.1"])
    files = 'tls_cert = "tls/cert.pem"\ntls_key = "tls/key.pem"\n'
    with running(configured(tmp_path / "c", files + CONFIG)) as server:
        server.opened.most = lambda: 20
        with silent(server.url, 50, ELSEWHERE) as held:
            pin = server._certificate.fingerprint if server._certificate else None
            join(server.url, token(server.config, "desktop"), "d", tmp_path / "a", certificate=pin)
            assert fleet_status(tmp_path / "a").closed_connections >= 30
            assert held[0].recv(1) == b""


def test_an_answer_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "ANSWER_S", 0.3)
    with running(configured(tmp_path / "c")) as server:
        port = int(server.url.rpartition(":")[2])
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        # Many answers that nobody takes, to requests that came together.
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
        assert_soon(lambda: len(server._uvicorn.server_state.connections) == 1)
        assert_soon(lambda: not server._uvicorn.server_state.connections)
        connection.close()


@dataclass(eq=False)
class Made:
    """A connection, and whether it was dropped."""

    name: str
    dropped: bool = False

    def drop(self) -> None:
        self.dropped = True


class Table:
    """Connections to a server that takes `most` of them."""

    def __init__(self, most: int) -> None:
        self.opened = OpenConnections(MinuteLog(), lambda: most)
        self.made: list[Made] = []

    def add(self, address: str, rank: Rank = Rank.SILENT, device: str | None = None) -> Made:
        connection = Made(f"{len(self.made)} {address} {rank.name}")
        self.made.append(connection)
        self.opened.add(connection, address)
        self.opened.rank(connection, rank, device)
        return connection

    def dropped(self) -> list[str]:
        return [connection.name for connection in self.made if connection.dropped]


def test_who_gives_way() -> None:
    """The least useful first; of equals one of the address that has most, its oldest."""
    table = Table(10)
    table.add("a", Rank.BUSY, "device-1")
    table.add("b", Rank.IDLE)
    for rank in (Rank.IDLE, Rank.STRANGER, Rank.SILENT, Rank.SILENT, Rank.IDLE):
        table.add("c", rank)
    table.add("d")
    table.add("d")
    assert table.dropped() == []
    for gives_way in ("4 c SILENT", "5 c SILENT", "7 d SILENT", "8 d SILENT", "3 c STRANGER"):
        before = table.dropped()
        table.add(f"f{len(table.made)}", Rank.IDLE)
        assert sorted(table.dropped()) == sorted([*before, gives_way])
    assert table.opened.closed == len(table.dropped())


def test_requests_of_devices_are_cut_off_last() -> None:
    """Only those of an address that has more than half of all, and never for its own sake."""
    table = Table(10)
    first = table.add("a", Rank.BUSY, "device-0")
    many = [table.add("b", Rank.BUSY, f"device-{number}") for number in range(1, 5)]
    assert table.dropped() == []
    assert table.add("b").dropped
    assert not table.add("c").dropped
    dropped = [connection.dropped for connection in (first, *many)]
    assert dropped == [False, True, False, False, False]
    assert not table.add("c", Rank.IDLE).dropped
    equal = Table(4)
    kept = [equal.add(address, Rank.BUSY, address) for address in "ab"]
    assert equal.add("c").dropped
    assert not any(connection.dropped for connection in kept)


def test_a_device_has_few_requests_at_a_time() -> None:
    table = Table(1000)
    other = table.add("a", Rank.BUSY, "device-2")
    busy = [table.add("a", Rank.BUSY, "device-1") for _ in range(MOST_BUSY + 3)]
    assert [connection.dropped for connection in busy] == [True] * 3 + [False] * MOST_BUSY
    table.opened.rank(busy[3], Rank.IDLE)
    assert not table.add("a", Rank.BUSY, "device-1").dropped
    assert not other.dropped
    for connection in table.made:
        table.opened.remove(connection)
        table.opened.remove(connection)
    assert not table.opened._busy
    assert not table.opened._addresses
    assert not table.opened._entries


def test_connections_wait_for_less_time_as_the_limit_comes_near() -> None:
    table, seconds = Table(100), []
    for _ in range(100):
        table.add("a")
        seconds.append(table.opened.keep_alive_s)
    assert seconds[:50] == [KEEP_ALIVE_S] * 50
    assert seconds[50:] == sorted(seconds[50:], reverse=True)
    assert seconds[74] == KEEP_ALIVE_S / 2
    assert seconds[-1] == SHORTEST_KEEP_ALIVE_S


def test_what_counts_as_one_address() -> None:
    assert network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1")
    assert network_of("2001:db8::1") == network_of("2001:db8::2:3:4:5")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("no address") == "no address"


def whole_answer(connection: socket.socket) -> bytes:
    """An answer whose body is a JSON object."""
    answer = connection.recv(4096)
    while not answer.endswith(b"}"):
        answer += connection.recv(4096)
    return answer


def test_the_same_poll_takes_the_short_way(server: Server, tmp_path: Path) -> None:
    """Its answers are those of the long way; whatever else comes on the connection takes that."""
    secret = join(server.url, token(server.config, "desktop"), "desk", tmp_path / "a").secret
    polls = server._uvicorn.config.app
    long_way: list[str] = []
    app = polls._app  # type: ignore[union-attr]

    async def counting(scope: dict[str, object], receive: object, send: object) -> None:
        long_way.append(str(scope.get("path")))
        await app(scope, receive, send)

    polls._app = counting  # type: ignore[union-attr]
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 20)
    poll = f"GET /v1/work HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n\r\n".encode()
    other = poll.replace(b"Host: x", b"Host: y")

    def answer(request: bytes, pieces: int = 1) -> dict[str, object]:
        size = len(request) // pieces + 1
        for begin in range(0, len(request), size):
            connection.sendall(request[begin : begin + size])
            if pieces > 1:
                assert_soon(lambda: True)
        with connection.makefile("rb") as reader:
            assert reader.readline() == b"HTTP/1.1 200 OK\r\n"
            headers = dict(line.lower().split(b": ") for line in iter(reader.readline, b"\r\n"))
            assert headers[b"content-type"] == b"application/json\r\n"
            answer: dict[str, object] = json.loads(reader.read(int(headers[b"content-length"])))
        assert 0 < float(str(answer.pop("ask_again_s"))) < 10
        return answer

    first = answer(poll)
    for request in (poll, poll, other, poll, other, other):
        assert answer(request) == first
    # Each other text is read once more, and one is remembered for a device.
    assert long_way == ["/v1/work"] * 4
    answer(other, pieces=3)
    assert len(long_way) == 5
    connection.sendall(other * 2)  # together: two requests, two answers
    assert_soon(lambda: len(long_way) == 7)
    connection.close()

    again = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 20)
    connection = again
    assert answer(other) == first  # also on a new connection
    assert len(long_way) == 7
    CoordinatorClient(server.url, secret).leave()
    again.sendall(other)
    assert re.match(rb"HTTP/1.1 401 ", again.recv(4096))
    again.close()


def test_polls_whose_answers_nobody_reads_are_not_answered(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one device could fill the coordinator's memory with answers."""
    taken: list[bytes] = []
    answer = RepeatedPolls.answer

    def counting(polls: RepeatedPolls, request: bytes) -> bytes | None:
        taken.append(request)
        return answer(polls, request)

    monkeypatch.setattr(RepeatedPolls, "answer", counting)
    secret = join(server.url, token(server.config, "desktop"), "desk", tmp_path / "a").secret
    assert_soon(lambda: not server._uvicorn.server_state.connections)
    poll = f"GET /v1/work HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n\r\n".encode()
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 20) as made:
        made.sendall(poll)
        assert whole_answer(made).startswith(b"HTTP/1.1 200 ")
        (connection,) = server._uvicorn.server_state.connections
        loop, flow = connection.loop, connection.flow  # type: ignore[union-attr]
        loop.call_soon_threadsafe(connection.pause_writing)
        assert_soon(lambda: flow.write_paused)
        before = len(taken)
        made.sendall(poll)
        CoordinatorClient(server.url, secret).work()  # the poll came before it
        assert poll not in taken[before:]
        loop.call_soon_threadsafe(connection.resume_writing)
        assert whole_answer(made).startswith(b"HTTP/1.1 200 ")


class StandingLoop:
    """The timers of a loop whose clock is moved by hand."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, 0
        self.timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        self.made += 1
        self.timers.append(asyncio.TimerHandle(self.now + delay, call, (), self))
        return self.timers[-1]

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        pass

    def move(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.when() <= self.now]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            if not timer.cancelled():
                timer._run()


class Wire:
    """A connection on which answers are written; it notes that it was closed."""

    def __init__(self) -> None:
        self.written, self.is_closed = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> object:
        return None


def test_polls_keep_a_connection_open_and_make_few_timers(server: Server) -> None:
    """A timer for each poll would cost more than the poll. An idle connection is closed."""
    loop, wire, settings = StandingLoop(), Wire(), server._uvicorn
    polls = SimpleNamespace(answer=lambda data: b"short", learn=lambda *about: None)
    opened = OpenConnections(MinuteLog(), lambda: 100)
    connection = connection_limits.Connection(
        opened, polls, settings.config, settings.server_state, {}, _loop=loop
    )
    connection.connection_made(wire)
    for _ in range(200):
        connection.data_received(b"x")
        loop.move(1.0)
    assert wire.written == 200 * b"short"
    assert loop.made < 10
    loop.move(KEEP_ALIVE_S - 2)
    assert not wire.is_closed
    loop.move(2)
    loop.move(2)
    assert wire.is_closed
    connection.connection_lost(None)


def test_polls_of_devices_that_left_are_forgotten(server: Server) -> None:
    polls = RepeatedPolls(server.coordinator)
    key = "key {}".format
    for number in range(50):
        device, secret = server.coordinator.store.registry.enrol(
            token(server.config, "desktop"), "x", key(number), "{}", lambda kind: None
        )
        server.coordinator.rounds.devices.add(device.id)
        polls.learn(secret.encode(), [(b"authorization", b"Bearer " + secret.encode())])
        assert secret.encode() in polls._secrets
        server.coordinator.store.registry.leave(device.id)
        server.coordinator.rounds.devices.remove(device.id)
        polls.learn(b"late", [(b"authorization", b"Bearer " + secret.encode())])
        assert b"late" not in polls._secrets
    assert len(polls._secrets) == len(polls._by_device) <= 3


def test_a_connection_stays_one_of_http(server: Server) -> None:
    """Another protocol would escape its limits, and nobody would note its end."""
    with socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), 20
    ) as connection:
        connection.sendall(
            b"GET /v1/work HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
        assert len(server.opened._entries) == 1
    assert_soon(lambda: not server.opened._entries)


def test_a_poll_with_a_body_takes_the_long_way(server: Server, tmp_path: Path) -> None:
    """Otherwise its body would be read as the next request."""
    secret = join(server.url, token(server.config, "desktop"), "desk", tmp_path / "a").secret
    with socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), 20
    ) as connection:
        for _ in range(3):
            connection.sendall(
                f"GET /v1/work HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n"
                "Content-Length: 5\r\n\r\n".encode()
            )
            connection.sendall(b"GET /")
            answer = whole_answer(connection)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.count(b"HTTP/1.1") == 1
