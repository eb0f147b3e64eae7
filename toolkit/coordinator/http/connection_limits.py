"""Limits of connections: their number, and the time for a request and for an answer."""

import asyncio
import resource
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import h11
from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from device_agent.formats.protocol.problems import API
from toolkit.coordinator.http.certificates import Certificate
from toolkit.coordinator.http.open_connections import OpenConnections, Rank

if TYPE_CHECKING:  # `serve` binds its port before it loads the coordinator
    from toolkit.coordinator.http.repeated_polls import RepeatedPolls

HEADERS_S = 20.0
"""How long a connection may take to send the headers of a request, and for the handshake of TLS, in
seconds."""
ANSWER_S = 60.0
"""How long a client may take to read a part (48 KiB) of an answer, in seconds."""
RESERVED = 128
"""File descriptors that are reserved for the coordinator's own files."""
POLL = f"{API}/work".encode()
CONNECTION = "connection"
"""The key of the Connection in the state of a request's scope."""


class Connection(H11Protocol):
    """A connection with limits. uvicorn limits neither the time nor the number of connections."""

    def __init__(
        self, opened: OpenConnections, polls: "RepeatedPolls | None", *args: Any, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._opened, self._polls = opened, polls
        self._device: str | None = None
        self._cycle: RequestResponseCycle | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self.app_state = {**self.app_state, CONNECTION: self}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Implement asyncio.Protocol."""
        super().connection_made(transport)
        self._opened.add(self, self.client[0] if self.client else "")
        self._limit_headers()

    def data_received(self, data: bytes) -> None:
        """Implement asyncio.Protocol."""
        at_rest = self._at_rest()
        # If too many answers are unread, uvicorn reads no more requests. `polls` must not read any
        # either.
        polls = self._polls if at_rest and not self.flow.write_paused else None
        answer = polls.answer(data) if polls is not None else None
        if answer is not None:
            self._cancel_timeout()
            self.transport.write(answer)
            self._opened.rank(self, Rank.IDLE)
            self._wait_for_poll()
            return
        super().data_received(data)
        self._note_request()
        if self._polls is not None and at_rest and self._is_whole_poll():
            self._polls.learn(data, self.headers)

    def on_response_complete(self) -> None:
        """Implement H11Protocol."""
        self._opened.rank(self, Rank.SILENT if self._device is None else Rank.IDLE)
        self.timeout_keep_alive = round(self._opened.keep_alive_s)
        super().on_response_complete()  # reads the next request if it has already come
        self._note_request()

    def authenticated(self, device: str | None) -> None:
        """Record that the current request has a valid secret of `device`, or a valid token."""
        self._device = device
        self._opened.rank(self, Rank.BUSY, device)

    def drop(self) -> None:
        """Implement Held."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """Implement asyncio.Protocol."""
        super().pause_writing()
        self._unread = self.loop.call_later(ANSWER_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Implement asyncio.Protocol."""
        self._cancel_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Implement asyncio.Protocol."""
        self._opened.remove(self)
        self._cancel_timeout()
        self._cancel_unread()
        if self._idle is not None:
            self._idle.cancel()
        super().connection_lost(exc)

    def _wait_for_poll(self) -> None:
        """Keep the connection open until it has been idle for too long.

        One timer serves many polls: a timer for each poll would cost more than the answer.
        """
        self._unset_keepalive_if_required()
        self._idle_since = self.loop.time()
        if self._idle is None:
            self._idle = self.loop.call_later(self._opened.keep_alive_s, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._idle = None
        if self.timeout_keep_alive_task is not None or not self._at_rest():
            return  # another request has come, and uvicorn limits the idle time after that request
        left = self._idle_since + self._opened.keep_alive_s - self.loop.time()
        if left > 0:
            self._idle = self.loop.call_later(left, self._close_if_idle)
        else:
            self.timeout_keep_alive_handler()

    def _at_rest(self) -> bool:
        """Whether the next byte begins a request."""
        states = (self.conn.our_state, self.conn.their_state)
        return states == (h11.IDLE, h11.IDLE) and self.conn.trailing_data == (b"", False)

    def _is_whole_poll(self) -> bool:
        """Whether the bytes since the connection was last idle are exactly one request for work."""
        if self.conn.their_state is not h11.DONE or self.conn.trailing_data != (b"", False):
            return False
        asked = (self.scope["method"], self.scope["raw_path"], self.scope["query_string"])
        return asked == ("GET", POLL, b"")

    def _note_request(self) -> None:
        """Limit the time for headers. RequestLimits limits the time for the body."""
        if self.cycle is not None and self.cycle is not self._cycle:
            self._cycle, self._device = self.cycle, None
            if not self.cycle.response_complete:
                self._opened.rank(self, Rank.STRANGER)
        self._limit_headers()

    def _limit_headers(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timeout()
        elif self._timeout is None and (self.cycle is None or not self._at_rest()):
            self._timeout = self.loop.call_later(HEADERS_S, self.transport.close)

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._timeout = None

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None


class Handshake(asyncio.Protocol):
    """A TLS connection during its handshake. asyncio reports a connection only afterwards."""

    def __init__(self, connection: Connection, opened: OpenConnections, tls: ssl.SSLContext):
        self._connection, self._opened, self._tls = connection, opened, tls
        self._early = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Implement asyncio.Protocol."""
        transport.pause_reading()
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self._opened.add(self, str(peer[0]) if peer else "")
        self._task = asyncio.get_running_loop().create_task(self._shake())

    def data_received(self, data: bytes) -> None:
        """Implement asyncio.Protocol: keep data that came with the end of the handshake."""
        self._early += data

    def drop(self) -> None:
        """Implement Held."""
        self._transport.abort()

    async def _shake(self) -> None:
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self._transport,
                self,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=HEADERS_S,
            )
        except (OSError, asyncio.CancelledError):
            transport = None
        self._opened.remove(self)
        if transport is None or transport.is_closing():
            self._transport.abort()
            return
        transport.set_protocol(self._connection)
        self._connection.connection_made(transport)
        if self._early:
            self._connection.data_received(self._early)


def connections(
    opened: OpenConnections, certificate: Certificate | None, polls: "RepeatedPolls | None" = None
) -> Callable[..., asyncio.Protocol]:
    """Return a function that creates the protocol of a connection: https with `certificate`."""

    def new_protocol(*args: Any, **settings: Any) -> asyncio.Protocol:
        connection = Connection(opened, polls, *args, **settings)
        if certificate is None:
            return connection
        return Handshake(connection, opened, certificate.context)

    return new_protocol


def undelivered(receive: Receive) -> bytes:
    """Take the part of a body that had come when the connection broke off.

    uvicorn reports the end of a connection at once, and drops data that the app did not receive.
    """
    cycle = getattr(receive, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return b""
    left = bytes(cycle.body)
    cycle.body.clear()
    return left


def most_connections() -> int:
    """How many file descriptors connections may use, including the files that they send."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED, 1)


def raise_descriptor_limit() -> None:
    """Raise this process's limit of file descriptors as far as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # `hard` may be more than the kernel allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
