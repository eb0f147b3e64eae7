"""Strict reading of JSON bodies: UTF-8 only, no lone surrogates, no NaN."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from profiles.json_decoding import MalformedError, decode_json


@dataclass(frozen=True)
class NotJson:
    """A body that is not JSON; `why` says where."""

    why: str


class StrictRequest(Request):
    """A request with strict JSON. Python's own reader accepts text that UTF-8 cannot encode."""

    async def json(self) -> Any:
        """The body, or NotJson, which FastAPI answers like a body of a wrong type.

        FastAPI would answer an error raised here before it checks the credentials.
        """
        try:
            return decode_json(await self.body(), object)
        except MalformedError as error:
            return NotJson(str(error))


class StrictRoute(APIRoute):
    """A route whose requests are StrictRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Implement APIRoute."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle
