"""HTTP servers that answer what a test wants, and a client whose waits take no time."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from device_agent.client.coordinator_client import CoordinatorClient

Answer = tuple[int, bytes]
Answers = Callable[[str, str], Answer]


class Server:
    """Answers whatever `answers` says, and remembers what was asked."""

    def __init__(self, port: int = 0) -> None:
        self.answers: Answers = lambda method, path: (200, b"{}")
        self.asked: list[tuple[str, str, bytes]] = []
        self.headers = {"Content-Type": "application/json"}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.asked.append((self.command, self.path, body))
                status, reply = outer.answers(self.command, self.path)
                self.send_response(status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST = do_PUT = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def follow(server: Server, answers: list[tuple[int, str, bytes]]) -> list[tuple[int, str, bytes]]:
    """Let `server` give these answers (status, content type, body). Returns those that are left."""

    def answer(method: str, path: str) -> Answer:
        status, kind, body = answers.pop(0)
        server.headers = {"Content-Type": kind, "Location": "http://login.lan/"}
        return status, body

    server.answers = answer
    return answers


@contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """The port of a program that gives each connection the next of these answers and closes it."""

    def serve(listening: socket.socket) -> None:
        for answer in answers:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                _read_request(connection)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(10)
        assert not thread.is_alive()  # every answer was asked for


def _read_request(connection: socket.socket) -> None:
    """Read all of it: closing with unread bytes would discard the answer on its way."""
    received = connection.recv(1 << 16)
    if received.startswith(b"\x16"):  # a TLS handshake
        return
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    missing = int(length[1]) - len(body) if length else 0
    while missing > 0:
        missing -= len(connection.recv(1 << 16))


def link(url: str, **options: object) -> tuple[CoordinatorClient, list[float]]:
    slept: list[float] = []
    options = {"sleep": slept.append, **options}
    return CoordinatorClient(url, "secret", **options), slept  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()
