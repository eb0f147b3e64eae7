"""Checks every request before it reaches the routes: its sender, and its body's size and time."""

import asyncio
import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from device_agent.cli.console import write_traceback
from device_agent.log_format import REQUEST
from profiles.errors import EdgeTailorError
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.http.admission import admit, discard
from toolkit.coordinator.http.connection_limits import undelivered
from toolkit.coordinator.http.problem_answers import refused
from toolkit.coordinator.refusals import RefusalError, cut_off

logger = logging.getLogger(__name__)

ALL_BODIES = 256 << 20
"""The most bytes of all bodies together that are received at a time."""
BODY_S = 60.0
"""How long a body may take, in seconds. For tensors, how long the next piece may take."""
LEAST_RATE = 1024
"""The lowest rate of an upload of tensors after its first BODY_S seconds, in bytes per second."""
REQUEST_ID = "X-Request-Id"
"""The header with the id of a request, which is also in the JSON log. Repeated polls have no id."""
FAILED = "{more} requests failed in this way ({who})."


class RequestLimits:
    """Passes only complete bodies of admitted requests to `app`. Uploads (PUT) are streamed.

    A client whose body never ends or never comes occupies only a connection. No part of a body is
    kept before the secret or token in the request's headers was found valid. If the app fails, it
    answers the request and raises the error. This class then logs the error in one line, and
    writes the traceback to a file.
    """

    def __init__(self, app: ASGIApp, coordinator: Coordinator) -> None:
        self._app, self._coordinator = app, coordinator
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Implement ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identifier = _request_id(scope)
        before = REQUEST.set(identifier)
        try:
            await self._answer(scope, receive, _with_id(send, identifier))
        finally:
            REQUEST.reset(before)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            limit = await admit(scope, self._coordinator)
            if not limit:
                body = _then(b"", receive)
            elif scope["method"] == "PUT":
                body = _with_timeout(receive)
            else:
                body = await self._complete(receive, limit)
        except RefusalError as refusal:
            answer = refused(Request(scope), refusal, self._coordinator.minute_log)
            if not await discard(scope, receive):
                # Closing the connection discards the rest of the body.
                answer.headers["Connection"] = "close"
            await answer(scope, receive, send)
            return
        try:
            await self._app(scope, body, send)
        except Exception as error:
            self._log(error)

    async def _complete(self, receive: Receive, limit: int) -> Receive:
        """Receive a body of at most `limit` bytes. Return a `receive` that gives it at once."""
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                more = True
                while more:
                    message = await receive()
                    self._hold(body, message.get("body", b""), limit)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise cut_off() from None
        finally:
            self._held -= len(body)
        return _then(bytes(body), receive)

    def _hold(self, body: bytearray, piece: bytes, limit: int) -> None:
        """Add `piece` to `body`. Raises RefusalError if that exceeds a limit."""
        if len(body) + len(piece) > limit:
            raise RefusalError(
                "This request may have at most {limit_bytes} bytes.",
                status=413,
                code="client.too-large",
                limit_bytes=limit,
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
        # A client that repeats its request must not fill the disk with lines and tracebacks.
        if not self._coordinator.minute_log.begins(type(error).__name__, FAILED):
            return
        if isinstance(error, EdgeTailorError):
            logger.error("A request failed: %s", error)
        elif isinstance(error, OSError):
            logger.error(
                "A request failed: %s: %s.", error.filename or "a file", error.strerror or error
            )
        else:
            path = write_traceback("edgetailor")
            logger.error("A request failed because of a fault in this program. Details: %s", path)


def _request_id(scope: Scope) -> str:
    """The id that the client or a proxy gave to the request, or a new one."""
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given) else secrets.token_hex(8)


def _with_id(send: Send, identifier: str) -> Send:
    """Return a `send` that adds the id of the request to the head of the answer."""

    async def messages(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[REQUEST_ID] = identifier
        await send(message)

    return messages


def _then(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first gives the whole `body`, then continues with `receive`."""
    whole: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def messages() -> Message:
        nonlocal whole
        given, whole = whole, None
        return given or await receive()

    return messages


def _with_timeout(receive: Receive) -> Receive:
    """Return a `receive` that reports a client as disconnected if it stops within its body.

    The same holds for a client that is slower than LEAST_RATE over the whole body.
    """
    whole, received, begun = False, 0, asyncio.get_running_loop().time()

    async def messages() -> Message:
        nonlocal whole, received
        if whole:
            return await receive()
        used = asyncio.get_running_loop().time() - begun
        left = BODY_S + received / LEAST_RATE - used
        try:
            message = await asyncio.wait_for(receive(), min(left, BODY_S))
        except TimeoutError:
            return {"type": "http.disconnect"}
        received += len(message.get("body", b""))
        remains = undelivered(receive) if message["type"] == "http.disconnect" else b""
        if remains:
            return {"type": "http.request", "body": remains, "more_body": True}
        whole = not message.get("more_body", False)
        return message

    return messages
