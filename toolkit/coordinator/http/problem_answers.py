"""Errors as answers: every refusal is a Problem, and refused credentials are logged."""

import logging
from dataclasses import asdict

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from device_agent.formats.protocol import Problem
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


def _problem(status: int, problem: Problem, headers: dict[str, str] | None = None) -> JSONResponse:
    headers = headers or HEADERS.get(status)
    return JSONResponse(asdict(problem), status_code=status, headers=headers)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusalError)
    return refused(request, error, request.app.state.coordinator.minute_log)


def refused(request: Request, error: RefusalError, log: MinuteLog) -> JSONResponse:
    """The answer to a refused request. Refused credentials are noted in `log`."""
    address = request.client.host if request.client else "an unknown address"
    if error.status in (401, 403) and log.begins(address, CREDENTIALS):
        logger.warning("Refused the credentials of a request from %s (%s).", address, error.code)
    size = error.values.get("size_bytes")
    headers = {"Content-Range": f"bytes */{size}"} if error.status == 416 else None
    return _problem(error.status, error.problem, headers)


def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = f"{place}: {first['msg']}."
    return _problem(422, Problem(code="client.bad-request", message=message))


def _http_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}. /docs lists all routes."
    return _problem(error.status_code, Problem(code="client.no-such-route", message=message))


def _fault(request: Request, error: Exception) -> JSONResponse:
    message = "The coordinator failed; its operator sees why in its log. Try again later."
    return _problem(500, Problem(code="federation.fault", message=message))
