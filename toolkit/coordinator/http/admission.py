"""Checks the credentials in a request's headers, before any part of its body is kept."""

import asyncio
from contextlib import suppress

from fastapi.security.utils import get_authorization_scheme_param
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope

from device_agent.formats.protocol.problems import API, KEY_CHANGES, NOT_AUTHORISED
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.operator_tokens import READ_ONLY, Operator
from toolkit.coordinator.http.connection_limits import CONNECTION, Connection
from toolkit.coordinator.refusals import RefusalError, forbidden

CALLER = "caller"
"""The key of the caller in the state of an admitted request's scope: its device, its operator or
its join token."""
FOR_JOIN_TOKENS = (f"{API}/invitation", f"{API}/devices")
OPERATOR_ROUTES = f"{API}/operator/"
"""Only an operator's token opens the routes under this path."""
METRICS = "/metrics"
PAGES = "/operator/"
"""The path of the operator's page. All pages under this path need a login, except OPEN_PAGES."""
LOGIN, LOGOUT = f"{PAGES}login", f"{PAGES}logout"
PUBLIC = f"{PAGES}public"
"""The view for everybody, which needs a login unless the federation's file has `public`."""
OPEN_PAGES = (LOGIN, f"{PAGES}files/")
SESSION = "session"
"""The key of the login in the state of an admitted request for a page, with its id."""
NO_LOGIN = "operator.no-login"
BODY_LIMIT = 4 << 20
"""The most bytes of a body. Uploads of tensors are exempt: their route limits them."""
FORM_LIMIT = 4 << 10
"""The most bytes of a form. One of them, the login, comes before the sender is known."""
CREDENTIALS = "A join token, device secret or operator token."
READING = ("GET", "HEAD")
"""The methods that a token with the role `read-only` allows."""
NOT_OPERATOR = "operator.other-token"
DISCARDED = 64 << 10
DISCARDED_S = 2.0
"""How much of a stranger's body is read and dropped, in bytes and seconds. The body is read so that
the answer also reaches a client that sends its whole body first."""


async def admit(scope: Scope, coordinator: Coordinator) -> int:
    """Check the credentials of a request. Returns how many bytes of its body may be kept.

    Raises RefusalError (401, 403).
    """
    path = scope["path"]
    if path.startswith(PAGES):
        is_public = path == PUBLIC and coordinator.config.public
        if not path.startswith(OPEN_PAGES) and not is_public:
            _admit_to_page(scope, coordinator)
        return FORM_LIMIT if scope["method"] == "POST" else 0
    if not path.startswith(f"{API}/") and path != METRICS:
        return 0
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
    operator = coordinator.operator_with(secret) if device is None else None
    if path.startswith(OPERATOR_ROUTES) or path == METRICS:
        if operator is None:
            raise _not_the_operator(device is not None)
        _check_role(operator, scope["method"])
    elif path in FOR_JOIN_TOKENS or (path == f"{API}{KEY_CHANGES}" and device is None):
        await run_in_threadpool(coordinator.check_join_token, secret)
    elif device is None and not (path == f"{API}/status" and operator is not None):
        device = await run_in_threadpool(coordinator.authenticate, secret)
    scope["state"][CALLER] = device or operator or secret
    _note_authenticated(scope, None if device is None else device.id)
    return BODY_LIMIT


def _admit_to_page(scope: Scope, coordinator: Coordinator) -> None:
    """Check the login of a request for a page. Its token must still be an operator's."""
    identifier = Request(scope).cookies.get(coordinator.cookie, "")
    session = coordinator.sessions.find(identifier)
    operator = None if session is None else coordinator.operator_with(session.token)
    if operator is None:
        raise RefusalError(
            "Log in with an operator's token at {page}.", status=401, code=NO_LOGIN, page=LOGIN
        )
    if scope["path"] != LOGOUT:
        _check_role(operator, scope["method"])
    scope["state"][SESSION] = identifier, session
    scope["state"][CALLER] = operator
    _note_authenticated(scope, None)


def _note_authenticated(scope: Scope, device: str | None) -> None:
    connection = scope["state"].get(CONNECTION)
    if isinstance(connection, Connection):
        connection.authenticated(device)


def _not_the_operator(is_member: bool) -> RefusalError:
    """The refusal of a device's secret or of another token on the operator's routes."""
    return RefusalError(
        "Only the operator may do this: give the token in operator.token of the coordinator's "
        "state folder, or one that `edgetailor add-operator` has made.",
        status=403 if is_member else 401,
        code=NOT_OPERATOR if is_member else NOT_AUTHORISED,
    )


def _check_role(operator: Operator, method: str) -> None:
    """Raise RefusalError (403) if the operator's role does not allow requests of this method."""
    if operator.role == READ_ONLY and method not in READING:
        raise forbidden(
            "The token of {name} has the role read-only, which can show the federation but change "
            "nothing. Use a token with the role operator.",
            code="operator.read-only",
            name=operator.name,
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
