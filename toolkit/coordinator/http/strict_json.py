"""Strict reading of JSON bodies: UTF-8 only, no lone surrogates, no NaN."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from profiles.json_decoding import MalformedError, decode_json


class StrictRequest(Request):
    """A request with strict JSON. Python's own reader accepts text that UTF-8 cannot encode."""

    async def json(self) -> Any:
        """The body. Raises JSONDecodeError, which FastAPI answers like a wrong type."""
        try:
            return decode_json(await self.body(), object)
        except MalformedError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class StrictRoute(APIRoute):
    """A route whose requests are StrictRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Implement APIRoute."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle
