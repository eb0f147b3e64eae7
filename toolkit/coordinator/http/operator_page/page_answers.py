"""Answers of the operator's page, and the parts of a request that every route needs."""

from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.operator_tokens import READ_ONLY, Operator
from toolkit.coordinator.http.admission import CALLER, PAGES, SESSION
from toolkit.coordinator.http.problem_answers import relative
from toolkit.coordinator.operation.operator_sessions import Session
from toolkit.coordinator.refusals import RefusalError, forbidden, unusable
from toolkit.web.built_page import HOW_TO_BUILD, Page
from toolkit.web.operator.templates import filled
from toolkit.web.static_files import SECURITY

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = SECURITY | {
    "Content-Security-Policy": POLICY,
    # With "no-referrer" browsers would send forms with `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SCRIPT, STYLE, ICON = "operator.js", "operator.css", "icon.svg"
FORM = "application/x-www-form-urlencoded"


def coordinator_of(request: Request) -> Coordinator:
    """The coordinator that the request is for."""
    coordinator: Coordinator = request.app.state.coordinator
    return coordinator


def session_of(request: Request) -> tuple[str, Session]:
    """The login of an admitted request, and its id."""
    session: tuple[str, Session] = request.scope["state"][SESSION]
    return session


def operator_of(request: Request) -> Operator:
    """The operator who sent an admitted request for a page."""
    operator: Operator = request.scope["state"][CALLER]
    return operator


def built_names(page: Page | None) -> dict[str, str] | None:
    """The names of the page's script and style, which contain hashes; None if not built."""
    names = {
        f"{name.split('.')[0]}.{name.split('.')[-1]}": name
        for name in page or {}
        if name.startswith("operator.")
    }
    return names if {SCRIPT, STYLE} <= names.keys() else None


def shown(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """The page that results from `template` filled with `values`."""
    names = request.app.state.operator_files
    if names is None:
        return HTMLResponse(filled("not_built.html", how_to_build=HOW_TO_BUILD), 503, HEADERS)
    session = request.scope["state"].get(SESSION)
    notice = None
    if session is not None and "hx-request" not in request.headers:
        notice, session[1].notice = session[1].notice, None
    given = {
        "root": relative(request, PAGES),
        "here": request.url.query,
        "script": names[SCRIPT],
        "style": names[STYLE],
        "notice": notice,
        "writes": session is not None and operator_of(request).role != READ_ONLY,
        "operator": None if session is None else operator_of(request).name,
        "form_token": None if session is None else session[1].form_token,
    }
    return HTMLResponse(filled(template, **given | values), status, HEADERS)


def to(request: Request, path: str) -> Response:
    """Send the browser to another page, after a form."""
    location = quote(relative(request, path))
    return Response(status_code=303, headers=HEADERS | {"Location": location})


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form that a page of this site sent.

    Raises RefusalError: 403 if another site sent it, 422 if it is malformed.
    """
    _check_origin(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise unusable("Send the form as {type}.", code="client.bad-request", type=FORM)
    try:
        text = (await request.body()).decode()
        return dict(parse_qsl(text, keep_blank_values=True, strict_parsing=True))
    except ValueError:
        raise unusable("The form cannot be read.", code="client.bad-request") from None


async def order_of(request: Request) -> dict[str, str]:
    """The fields of a form of the request's login.

    Raises RefusalError: 403 if another site sent it, 422 if it is malformed.
    """
    fields = await form_of(request)
    if not session_of(request)[1].sent(fields.pop("form_token", "")):
        raise _foreign()
    return fields


def _check_origin(request: Request) -> None:
    """Raise RefusalError if a browser says that another site sent this form."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        if site not in ("same-origin", "none"):
            raise _foreign()
    elif origin is not None and _host(origin) != request.headers.get("host"):
        raise _foreign()


def _host(origin: str) -> str | None:
    """The host and the port of an origin; None if it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _foreign() -> RefusalError:
    return forbidden(
        "This form was sent by another site, or by a page of an earlier login. Load the page again "
        "and send its form.",
        code="operator.foreign-form",
    )
