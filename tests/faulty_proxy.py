"""A TCP proxy that cuts, delays and truncates what it carries."""

import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

PIECE = 1 << 16
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER without waiting: closing resets the connection."""


@dataclass(frozen=True)
class Fault:
    """What happens to one connection.

    It ends after `up` bytes to the server or `down` bytes to the client, with a reset if `reset`.
    Each piece comes `delay_s` seconds late. With an `answer` the client gets that in place of the
    server's. With `half_body` the first body ends in its middle.
    """

    up: int | None = None
    down: int | None = None
    reset: bool = False
    delay_s: float = 0.0
    answer: bytes | None = None
    half_body: bool = False


Plan = Callable[[], Fault]
"""The fault of the next connection."""


@dataclass
class Carried:
    """Bytes that went through, and how many connections were cut."""

    up: int = 0
    down: int = 0
    connections: int = 0
    cut: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    clients: list[socket.socket] = field(default_factory=list)

    def end_all(self) -> None:
        """End all connections, so that the next request gets the next fault."""
        for client in self.clients:
            with suppress(OSError):  # it has ended
                client.shutdown(socket.SHUT_RDWR)
        self.clients.clear()


@contextmanager
def listening(meet: Callable[[socket.socket], None], port: int = 0) -> Iterator[str]:
    """Call `meet` with the connection of every client that comes to the URL."""
    with socket.create_server(("127.0.0.1", port), backlog=128) as server:

        def accept() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                meet(_without_delay(client))

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        # A shutdown, because closing alone does not end `accept`.
        server.shutdown(socket.SHUT_RDWR)


def _without_delay(connection: socket.socket) -> socket.socket:
    """`connection`, on which bodies do not wait 40 ms for the acknowledgement of their headers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def connected(client: socket.socket, url: str) -> socket.socket | None:
    """A connection to the server at `url`; if it is away, `client` is closed."""
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        return _without_delay(socket.create_connection((host, int(port))))
    except OSError:
        client.close()
        return None


@contextmanager
def proxy(target: Callable[[], str], plan: Plan) -> Iterator[tuple[str, Carried]]:
    """A proxy before the server whose URL `target` gives; its URL, and what it has carried."""
    carried = Carried()

    def meet(client: socket.socket) -> None:
        fault = plan()
        carried.connections += 1
        if fault.answer is not None:
            threading.Thread(target=_answer, args=(client, fault.answer)).start()
        elif server := connected(client, target()):
            carried.clients.append(client)
            for pair, way in (((client, server), "up"), ((server, client), "down")):
                arguments = (*pair, fault, way, carried)
                threading.Thread(target=_carry, args=arguments, daemon=True).start()

    with listening(meet) as url:
        yield url, carried


def _carry(
    source: socket.socket, to: socket.socket, fault: Fault, way: str, carried: Carried
) -> None:
    limit, sent = getattr(fault, way), 0
    try:
        if fault.half_body and way == "down":
            limit = sent = _send_half(source, to)
        while limit is None or sent < limit:
            piece = source.recv(PIECE if limit is None else min(PIECE, limit - sent))
            if not piece:
                return
            time.sleep(fault.delay_s)
            to.sendall(piece)
            sent += len(piece)
            with carried.lock:
                setattr(carried, way, getattr(carried, way) + len(piece))
        with carried.lock:
            carried.cut += 1
        if fault.reset:
            for end in (source, to):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    except OSError:  # the other direction has ended the connection
        return
    finally:
        for end in (source, to):
            # Wakes the thread of the other direction, which keeps the connection open otherwise.
            with suppress(OSError):
                end.shutdown(socket.SHUT_RD if fault.reset else socket.SHUT_RDWR)
            end.close()


def _send_half(source: socket.socket, to: socket.socket) -> int:
    """Send answers up to the half of the first body; how many bytes that was."""
    answers, end = b"", 0
    while True:
        while b"\r\n\r\n" not in answers[end:] and (piece := source.recv(PIECE)):
            answers += piece
        head, _, _ = answers[end:].partition(b"\r\n\r\n")
        announced = re.search(rb"^content-length: *([1-9]\d*)", head, re.I | re.M)
        begin, end = end, end + len(head) + 4
        if announced or len(answers) < end:
            break
        to.sendall(answers[begin:end])
    end += int(announced[1]) // 2 if announced else 0
    while len(answers) < end and (piece := source.recv(PIECE)):
        answers += piece
    to.sendall(answers[begin:end])
    return end


def _answer(client: socket.socket, answer: bytes) -> None:
    """Give the first request of `client` this answer, and close the connection."""
    with client, suppress(OSError):
        client.settimeout(5)
        client.recv(PIECE)
        client.sendall(answer)
        client.shutdown(socket.SHUT_WR)
        while client.recv(PIECE):  # closing with unread bytes would discard the answer
            pass


HEADERS_BYTES = 500
"""About the size of a request, or of an answer, without a file."""


def at_random(seed: int, file_bytes: int) -> Plan:
    """Faults at random: every connection ends somewhere, early or within a file of that size."""
    draw, lock = random.Random(seed), threading.Lock()

    def next_fault() -> Fault:
        with lock:
            ends = int(draw.expovariate(1 / draw.choice((HEADERS_BYTES, file_bytes))))
            up, down = draw.choice(((ends, None), (None, ends)))
            return Fault(up, down, draw.random() < 0.3, draw.choice((0.0, 0.0, 0.001, 0.01)))

    return next_fault
