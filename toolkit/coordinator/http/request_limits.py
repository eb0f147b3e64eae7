"""Limits on every request before it reaches the routes: size and time of its body."""

import asyncio
import logging
from dataclasses import asdict

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from device_agent.cli.console import write_traceback
from profiles.errors import EdgeTailorError
from toolkit.coordinator.http.connection_limits import undelivered
from toolkit.coordinator.refusals import RefusalError, cut_off

logger = logging.getLogger(__name__)

BODY_LIMIT = 4 << 20
"""The most bytes of a body. Uploads of tensors are exempt: their route limits them."""
ALL_BODIES = 256 << 20
"""The most bytes of all bodies together that are being received."""
BODY_S = 60.0
"""How long a body may take, in seconds; for tensors, how long their next piece may take."""


class RequestLimits:
    """Passes only complete bodies to `app`, except uploads (PUT), which it may stream.

    A body that never ends or never comes costs only a connection. Without a valid secret nobody
    can make the coordinator hold more than BODY_LIMIT in memory. A fault of the program, which the
    app has answered, is logged in one line; its traceback goes to a file.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._logged: str | None = None
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implement ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            streamed = scope["method"] == "PUT"
            body = _with_timeout(receive) if streamed else await self._complete(receive)
        except RefusalError as refusal:
            # Closing the connection discards the rest of the body.
            headers = {"Connection": "close"}
            answer = JSONResponse(asdict(refusal.problem), refusal.status, headers=headers)
            await answer(scope, receive, send)
            return
        try:
            await self._app(scope, body, send)
        except Exception as error:
            self._log(error)

    async def _complete(self, receive: Receive) -> Receive:
        """A `receive` that gives the body in one message, then what follows."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                more = True
                while more:
                    message = await receive()
                    self._hold(body, message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            raise cut_off() from None
        finally:
            self._held -= len(body)
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def messages() -> Message:
            nonlocal whole
            given, whole = whole, None
            return given or await receive()

        return messages

    def _hold(self, body: bytearray, piece: bytes) -> None:
        """Add `piece` to `body`. Raises RefusalError if that exceeds a limit."""
        if len(body) + len(piece) > BODY_LIMIT:
            raise RefusalError(
                f"A request may have at most {BODY_LIMIT} bytes, except an upload of tensors.",
                status=413,
                code="client.too-large",
                limit_bytes=BODY_LIMIT,
            )
        if self._held + len(piece) > ALL_BODIES:
            raise RefusalError(
                "The coordinator is receiving too much at once: try again later.",
                status=503,
                code="federation.busy",
            )
        body += piece
        self._held += len(piece)

    def _log(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text == self._logged:  # a client that repeats its request must not fill the disk
            return
        self._logged = text
        if isinstance(error, EdgeTailorError):
            logger.error("A request failed: %s", error)
        elif isinstance(error, OSError):
            logger.error(
                "A request failed: %s: %s.", error.filename or "a file", error.strerror or error
            )
        else:
            place = write_traceback("edgetailor")
            logger.error("A request failed because of a fault in this program. Details: %s", place)


def _with_timeout(receive: Receive) -> Receive:
    """`receive`, which treats a client that stops within its body as disconnected."""
    whole = False

    async def messages() -> Message:
        nonlocal whole
        if whole:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), BODY_S)
        except TimeoutError:
            return {"type": "http.disconnect"}
        left = undelivered(receive) if message["type"] == "http.disconnect" else b""
        if left:
            return {"type": "http.request", "body": left, "more_body": True}
        whole = not message.get("more_body", False)
        return message

    return messages
