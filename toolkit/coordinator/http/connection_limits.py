"""Connections bounded in number, and in how long they may take to say what they want."""

import asyncio
import resource
from contextlib import suppress

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0
"""How long, in seconds, a connection may take to send a request's headers, once it began to."""
RESERVED = 128
"""File descriptors that are kept for the coordinator's own files."""


class Connection(H11Protocol):
    """One connection. uvicorn by itself waits for ever for headers, and takes any number."""

    _silent: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Give what was begun a time to become a request; one that has is left to the guard."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._silent is None:
            self._silent = self.loop.call_later(HEADERS_S, self.transport.close)

    def _forget(self) -> None:
        if self._silent is not None:
            self._silent.cancel()
        self._silent = None


def most_connections() -> int:
    """How many there may be at a time: each may have a file open besides."""
    return max((resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED) // 2, 1)


def allow_many() -> None:
    """Raise this process's limit of file descriptors as far as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # where `hard` is more than the kernel gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
