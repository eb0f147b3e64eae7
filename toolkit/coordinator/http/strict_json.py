"""Bodies as JSON that can be kept and sent on: UTF-8, without half a surrogate pair or NaN."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from profiles.json_decoding import MalformedError, decode_json


class StrictRequest(Request):
    """A request whose JSON is read strictly; Python's own reader takes what UTF-8 cannot hold."""

    async def json(self) -> Any:
        """The body. Raises JSONDecodeError, which FastAPI answers as it does mistakes in types."""
        try:
            return decode_json(await self.body(), object)
        except MalformedError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class StrictRoute(APIRoute):
    """A route for StrictRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return handle
