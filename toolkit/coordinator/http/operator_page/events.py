"""Tells open pages about changes by server-sent events, without a thread for each page."""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.http.operator_page.page_answers import (
    HEADERS,
    coordinator_of,
    session_of,
)
from toolkit.coordinator.operation.operator_sessions import Session

TICK_S = 1.0
"""Seconds between two checks of the federation for changes. An open page reloads at most this
often."""
KEEP_ALIVE_S = 20.0
"""After this many seconds without an event, a comment shows proxies that the stream is open."""
MOST = 20
"""The largest number of open streams. If a new one would exceed it, the oldest one ends."""


class Streams:
    """The open streams of events. All work is done in the event loop."""

    def __init__(self) -> None:
        self._open: dict[object, None] = {}

    async def events(
        self, coordinator: Coordinator, login: str, session: Session
    ) -> AsyncIterator[str]:
        """Give an event when the federation has changed, until the login with this id ends."""
        this, before, silent_s = object(), coordinator.pulse(), 0.0
        while len(self._open) >= MOST:
            del self._open[next(iter(self._open))]
        self._open[this] = None
        try:
            yield "retry: 3000\n\n"
            while self._goes_on(this, coordinator, login, session):
                await asyncio.sleep(TICK_S)
                silent_s += TICK_S
                now = coordinator.pulse()
                if now is not None and now != before:
                    before, silent_s = now, 0.0
                    yield "event: changed\ndata:\n\n"
                elif silent_s >= KEEP_ALIVE_S:
                    silent_s = 0.0
                    yield ":\n\n"
        finally:
            self._open.pop(this, None)

    def _goes_on(
        self, this: object, coordinator: Coordinator, login: str, session: Session
    ) -> bool:
        return (
            this in self._open
            and coordinator.sessions.is_open(login)
            and coordinator.operator_with(session.token) is not None
            and not coordinator.is_stopping()
        )


async def events(request: Request) -> Response:
    """Stream events to one page."""
    streams: Streams = request.app.state.streams
    stream = streams.events(coordinator_of(request), *session_of(request))
    headers = HEADERS | {"X-Accel-Buffering": "no"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
