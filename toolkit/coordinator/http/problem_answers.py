"""Answers errors: every refusal becomes a Problem, and refused credentials are logged."""

import logging
from dataclasses import asdict

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from device_agent.formats.protocol.problems import JOIN_TOKEN
from toolkit.coordinator.http.admission import LOGIN, NO_LOGIN
from toolkit.coordinator.http.server_socket import RETRY_S
from toolkit.coordinator.minute_log import MinuteLog
from toolkit.coordinator.refusals import RefusalError

logger = logging.getLogger(__name__)

HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": str(RETRY_S)}}
"""Headers of answers, by their status."""
CREDENTIALS = "Refused the credentials of {more} requests from {who}."


def answer_problems(app: FastAPI) -> None:
    """Let `app` answer every error with a Problem."""
    app.add_exception_handler(RefusalError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(Exception, _fault)


def _answer(error: RefusalError, headers: dict[str, str] | None = None) -> JSONResponse:
    headers = headers or HEADERS.get(error.status)
    return JSONResponse(asdict(error.problem), status_code=error.status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return refused(request, error, request.app.state.coordinator.minute_log)


def log_stranger(request: Request, code: str, log: MinuteLog) -> None:
    """Log that credentials were refused. `log` counts repetitions within a minute."""
    address = request.client.host if request.client else "an unknown address"
    if log.begins(address, CREDENTIALS):
        logger.warning("Refused the credentials of a request from %s (%s).", address, code)


def to_login(request: Request) -> Response:
    """Send a browser to the login. The login replaces the whole page, not only a part of it."""
    if "hx-request" in request.headers:
        return Response(status_code=401, headers={"HX-Refresh": "true"})
    return Response(status_code=303, headers={"Location": relative(request, LOGIN)})


def relative(request: Request, path: str) -> str:
    """`path`, relative to the page of `request`.

    A proxy may serve the coordinator below another path.

    Examples:
        >>> scope = {"type": "http", "path": "/operator/devices", "headers": []}
        >>> relative(Request(scope), "/operator/login")
        '../operator/login'
    """
    return "../" * (request.url.path.count("/") - 1) + path.removeprefix("/")


def refused(request: Request, error: RefusalError, log: MinuteLog) -> Response:
    """Answer a refused request. Refused credentials are logged; `log` counts repetitions."""
    # A valid join token comes from `edgetailor-agent doctor`, not from a stranger.
    if error.status in (401, 403) and error.code not in (JOIN_TOKEN, NO_LOGIN):
        log_stranger(request, error.code, log)
    if error.code == NO_LOGIN and "text/html" in request.headers.get("accept", ""):
        return to_login(request)
    size = error.values.get("size_bytes")
    headers = {"Content-Range": f"bytes */{size}"} if error.status == 416 else None
    return _answer(error, headers)


def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _answer(
        RefusalError(
            "{place}: {reason}.",
            status=422,
            code="client.bad-request",
            place=".".join(str(part) for part in first["loc"]),
            reason=first["msg"],
        )
    )


def _http_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _answer(
        RefusalError(
            "{method} {path}: {reason}. /docs lists all routes.",
            status=error.status_code,
            code="client.no-such-route",
            method=request.method,
            path=request.url.path,
            reason=error.detail,
        )
    )


def _fault(request: Request, error: Exception) -> JSONResponse:
    return _answer(
        RefusalError(
            "The coordinator failed; its log has the reason. Try again later.",
            status=500,
            code="federation.fault",
        )
    )
