"""Decodes the body of a request strictly: one JSON object of a message's type.

The body must be UTF-8, without repeated keys and NaN, and every number within the limits of its
type. The agent reads the coordinator's answers with the same decoder.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from profiles.json_decoding import MalformedError, decode_strictly
from toolkit.coordinator.refusals import RefusalError, unusable

T = TypeVar("T")
JSON = "application/json"
SCHEMAS = "#/components/schemas/{name}"


def body_of(message: type[T]) -> Callable[[Request], Awaitable[T]]:
    """Make a FastAPI dependency that decodes the request's body as JSON of the type `message`.

    It raises RefusalError (422) if the body cannot be decoded.
    """

    async def read(request: Request) -> T:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != JSON:
            raise _malformed(f"its Content-Type has to be {JSON}")
        try:
            return decode_strictly(await request.body(), message)
        except MalformedError as error:
            raise _malformed(str(error)) from None

    return read


def _malformed(why: str) -> RefusalError:
    return unusable(
        "The body of the request cannot be used: {why}.", code="client.bad-request", why=why
    )


def described(message: type[Any]) -> dict[str, Any]:
    """The part of a route's description that names the type of its body."""
    schema = {"$ref": SCHEMAS.format(name=message.__name__)}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def schemas(messages: list[type[Any]]) -> dict[str, Any]:
    """The schemas of `messages`, by name."""
    _, components = msgspec.json.schema_components(messages, ref_template=SCHEMAS)
    return components
