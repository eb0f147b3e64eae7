"""Logs the operator in with a token, and out. The browser keeps only the random id of the login."""

from starlette.requests import Request
from starlette.responses import Response

from toolkit.coordinator.http.admission import LOGIN, PAGES
from toolkit.coordinator.http.operator_page.page_answers import (
    coordinator_of,
    form_of,
    order_of,
    session_of,
    shown,
    to,
)
from toolkit.coordinator.http.problem_answers import log_stranger

REFUSED = "login.wrong-token"


async def login_form(request: Request) -> Response:
    """Ask for the token."""
    return shown(request, "login.html", refused=False)


async def login(request: Request) -> Response:
    """Begin a login, and give its id as a cookie to the browser."""
    coordinator = coordinator_of(request)
    token = (await form_of(request)).get("token", "").strip()
    if coordinator.operator_with(token) is None:
        log_stranger(request, REFUSED, coordinator.minute_log)
        return shown(request, "login.html", 401, refused=True)
    answer = to(request, PAGES)
    answer.set_cookie(
        coordinator.cookie,
        coordinator.sessions.begin(token),
        path=None,  # the path of the login page, also below a proxy's path
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


async def logout(request: Request) -> Response:
    """End the login."""
    coordinator = coordinator_of(request)
    await order_of(request)
    coordinator.sessions.end(session_of(request)[0])
    answer = to(request, LOGIN)
    answer.set_cookie(coordinator.cookie, max_age=0, path=None)
    return answer
