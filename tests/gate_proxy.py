"""A TCP proxy with a gate: shut, it refuses connections or lets them stand still."""

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from faulty_proxy import PIECE, connected, listening

CHECK_S = 0.02
BAD_GATEWAY = (
    b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: application/json\r\n"
    b'Content-Length: 15\r\nConnection: close\r\n\r\n{"down": "yes"}'
)


class Gate:
    """What happens to connections: they pass, are refused and cut, stand still, or get BAD_GATEWAY.

    Attributes:
        limit: Bytes after which each connection is cut on its way to the server.
        piece: Bytes that are carried at a time, every 0.02 s.
    """

    def __init__(self) -> None:
        self.state: Literal["open", "refuse", "still", "bad", "ended"] = "open"
        self.limit: int | None = None
        self.piece: int | None = None

    def is_still(self) -> bool:
        return self.state == "still"

    def carry(self, source: socket.socket, to: socket.socket, limited: bool) -> None:
        """Carry what comes from `source` until one side, or the gate, ends it."""
        carried = 0
        with suppress(OSError, ValueError):  # the other direction has closed the sockets
            while self.state in ("open", "still"):
                if self.is_still():
                    time.sleep(CHECK_S)
                    continue
                if not select.select([source], [], [], CHECK_S)[0]:
                    continue
                piece = source.recv(self.piece or PIECE)
                if not piece:
                    break
                while self.is_still():
                    time.sleep(CHECK_S)
                to.sendall(piece)
                carried += len(piece)
                if self.piece is not None:
                    time.sleep(CHECK_S)
                if limited and self.limit is not None and carried > self.limit:
                    break
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def gate(target: str, port: int = 0) -> Iterator[tuple[str, Gate]]:
    """A gate before the server at the URL `target`; its URL and the gate."""
    opened = Gate()

    def meet(client: socket.socket) -> None:
        if opened.state in ("refuse", "bad"):
            with client, suppress(OSError):
                if opened.state == "bad":
                    client.recv(PIECE)
                    client.sendall(BAD_GATEWAY)
        elif server := connected(client, target):
            for pair, limited in (((client, server), True), ((server, client), False)):
                carrying = (*pair, limited)
                threading.Thread(target=opened.carry, args=carrying, daemon=True).start()

    with listening(meet, port) as url:
        yield url, opened
        opened.state = "ended"
