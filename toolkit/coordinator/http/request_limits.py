"""What every request meets before the routes: a body of bounded size and time, and faults told."""

import asyncio
import logging
from dataclasses import asdict

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from device_agent.cli.console import write_traceback
from profiles.errors import EdgeTailorError
from toolkit.coordinator.refusals import RefusalError, cut_off

logger = logging.getLogger(__name__)

BODY_LIMIT = 4 << 20
"""The most bytes that a body may have, tensors apart, which the routes bound themselves."""
ALL_BODIES = 256 << 20
"""The most bytes that all bodies that are on their way may have together."""
BODY_S = 60.0
"""How long, in seconds, such a body may take; of tensors, how long their next piece may."""


class RequestLimits:
    """Lets `app` see whole bodies only, except of uploads (PUT), which it may stream.

    So neither a body that never ends nor one that never comes costs more than a connection, and
    nothing is kept in memory for somebody without a secret beyond BODY_LIMIT. A fault of the
    program, which the app has answered, is logged in one line, its traceback in a file.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._told: str | None = None
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            streamed = scope["method"] == "PUT"
            body = _impatient(receive) if streamed else await self._whole(receive)
        except RefusalError as refusal:
            # The rest of the body, if there is one, is not waited for.
            headers = {"Connection": "close"}
            answer = JSONResponse(asdict(refusal.problem), refusal.status, headers=headers)
            await answer(scope, receive, send)
            return
        try:
            await self._app(scope, body, send)
        except Exception as error:
            self._tell(error)

    async def _whole(self, receive: Receive) -> Receive:
        """What gives the whole body at once, then whatever else comes. Raises RefusalError."""
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
        """Add `piece` to `body`. Raises RefusalError where that is too much."""
        if len(body) + len(piece) > BODY_LIMIT:
            text = f"A request has at most {BODY_LIMIT} bytes, tensors apart."
            raise RefusalError(413, "too-large", text)
        if self._held + len(piece) > ALL_BODIES:
            raise RefusalError(503, "busy", "Too much is being sent at once: try again later.")
        body += piece
        self._held += len(piece)

    def _tell(self, error: Exception) -> None:
        told = f"{type(error).__name__}: {error}"
        if told == self._told:  # whoever causes it again and again fills no disk
            return
        self._told = told
        if isinstance(error, EdgeTailorError):
            logger.error("A request failed: %s", error)
        elif isinstance(error, OSError):
            logger.error(
                "A request failed: %s: %s.", error.filename or "a file", error.strerror or error
            )
        else:
            place = write_traceback("edgetailor")
            logger.error(
                "A request failed; this is a fault of the program's own. Details: %s", place
            )


def _impatient(receive: Receive) -> Receive:
    """`receive`, for which a client that falls silent amid its body is one that has gone."""
    whole = False

    async def messages() -> Message:
        nonlocal whole
        if whole:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), BODY_S)
        except TimeoutError:
            return {"type": "http.disconnect"}
        whole = not message.get("more_body", False)
        return message

    return messages
