"""Checks the credentials in a request's headers, before any part of its body is kept."""

import asyncio
from contextlib import suppress

from fastapi.security.utils import get_authorization_scheme_param
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from device_agent.formats.protocol.problems import API, NOT_AUTHORISED
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.http.connection_limits import CONNECTION, Connection
from toolkit.coordinator.refusals import RefusalError

CALLER = "caller"
"""The key of the caller in the state of an admitted request's scope: its device or its token."""
FOR_JOIN_TOKENS = (f"{API}/invitation", f"{API}/devices")
OPERATOR_ROUTES = f"{API}/operator/"
"""Only the operator's token opens the routes under this path."""
METRICS = "/metrics"
CREDENTIALS = "A join token, device secret or operator token."
NOT_OPERATOR = "operator.other-token"
DISCARDED = 64 << 10
DISCARDED_S = 2.0
"""How much of a stranger's body is read and dropped, in bytes and seconds. So the answer also
reaches a client that sends its whole body first."""


async def admit(scope: Scope, coordinator: Coordinator) -> bool:
    """Check the credentials of a request; False if its path needs none.

    Raises RefusalError (401, 403).
    """
    path = scope["path"]
    if not path.startswith(f"{API}/") and path != METRICS:
        return False
    headers = Headers(scope=scope)
    scheme, secret = get_authorization_scheme_param(headers.get("authorization"))
    if scheme.lower() != "bearer" or not secret:
        raise RefusalError(
            "Send `Authorization: Bearer ...` with the device's secret or with a token.",
            status=401,
            code=NOT_AUTHORISED,
        )
    # A member's secret is found without waiting. Everything else may wait for the database.
    device = coordinator.member_with(secret)
    if path.startswith(OPERATOR_ROUTES) or path == METRICS:
        if not coordinator.is_operator(secret):
            raise _not_the_operator(device is not None)
    elif path in FOR_JOIN_TOKENS:
        await run_in_threadpool(coordinator.check_join_token, secret)
    elif device is None and not (path == f"{API}/status" and coordinator.is_operator(secret)):
        device = await run_in_threadpool(coordinator.authenticate, secret)
    scope["state"][CALLER] = secret if device is None else device
    connection = scope["state"].get(CONNECTION)
    if isinstance(connection, Connection):
        connection.authenticated(None if device is None else device.id)
    return True


def _not_the_operator(is_member: bool) -> RefusalError:
    """The refusal of a device's secret or of another token on the operator's routes."""
    return RefusalError(
        "Only the operator may do this: give the token in operator.token of the coordinator's "
        "state folder.",
        status=403 if is_member else 401,
        code=NOT_OPERATOR if is_member else NOT_AUTHORISED,
    )


def has_body(scope: Scope) -> bool:
    """Whether the request announces a body."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def discard(scope: Scope, receive: Receive) -> bool:
    """Read and drop a short body. Returns whether the whole body was read."""
    left, more = DISCARDED, has_body(scope)
    if not more or "expect" in Headers(scope=scope):
        return not more
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARDED_S):
            while more and left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                more = message.get("more_body", False)
    return not more
