"""Limits on the number of connections and on the time for a request's headers."""

import asyncio
import resource
from contextlib import suppress

from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEADERS_S = 20.0
"""How long a connection may take to send the headers of a request, in seconds."""
RESERVED = 128
"""File descriptors that are reserved for the coordinator's own files."""


class Connection(H11Protocol):
    """One connection. uvicorn itself waits for headers without limit and takes any number."""

    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Implement asyncio.Protocol."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        self._limit_headers()

    def data_received(self, data: bytes) -> None:
        """Implement asyncio.Protocol."""
        super().data_received(data)
        self._limit_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Implement asyncio.Protocol."""
        self._cancel_timeout()
        super().connection_lost(exc)

    def _limit_headers(self) -> None:
        """Limit the time for headers. From then on RequestLimits limits the body."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timeout()
        elif self._timeout is None:
            self._timeout = self.loop.call_later(HEADERS_S, self.transport.close)

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._timeout = None


def undelivered(receive: Receive) -> bytes:
    """What had come of a body when its connection broke off, once.

    uvicorn reports the end of a connection at once and drops what the app had not received yet.
    """
    cycle = getattr(receive, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return b""
    left = bytes(cycle.body)
    cycle.body.clear()
    return left


def most_connections() -> int:
    """How many connections there may be at a time. Each may have one open file."""
    return max((resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED) // 2, 1)


def raise_descriptor_limit() -> None:
    """Raise this process's limit of file descriptors as far as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # `hard` may be more than the kernel gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
