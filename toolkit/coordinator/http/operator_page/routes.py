"""The routes of the operator's page. `admission.py` says which of them strangers may use."""

import inspect
from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from toolkit.coordinator.http.admission import PAGES
from toolkit.coordinator.http.operator_page import events, forms, login, round_forms, views
from toolkit.coordinator.http.operator_page.page_answers import HEADERS, ICON, built_names, shown
from toolkit.coordinator.refusals import RefusalError
from toolkit.web.built_page import Page
from toolkit.web.static_files import file_answer

View = Callable[[Request], Response] | Callable[[Request], Awaitable[Response]]
_POST = ["POST"]


def add_operator_page(app: FastAPI, page: Page | None) -> None:
    """Add the operator's page to `app`. Its script and style are among the files of `page`."""
    app.state.operator_files = names = built_names(page)
    app.state.streams = events.Streams()
    files = {} if page is None or names is None else {n: page[n] for n in (*names.values(), ICON)}
    app.router.routes.extend(_routes(files))


def _routes(files: Page) -> Sequence[BaseRoute]:
    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            raise HTTPException(404)
        return file_answer(request, files[name])

    return [
        Route("/", _to_pages),
        Route(PAGES.rstrip("/"), _to_pages),
        Route(f"{PAGES}files/{{name}}", file),
        Route(f"{PAGES}events", events.events),
        _page("", views.overview),
        _page("login", login.login_form),
        _page("login", login.login, _POST),
        _page("logout", login.logout, _POST),
        _page("public", views.public),
        _page("devices", views.devices),
        _page("devices/{device}", views.device),
        _page("devices/{device}/secret", forms.rotate_secret, _POST),
        _page("devices/{device}/{action}", forms.act, _POST),
        _page("devices/{device}/update/drop", round_forms.drop_update, _POST),
        _page("rounds/pause", round_forms.pause, _POST),
        _page("rounds/resume", round_forms.resume, _POST),
        _page("round/close", round_forms.close, _POST),
        _page("round/abort", round_forms.abort, _POST),
        _page("round/deadline", round_forms.move_deadline, _POST),
        _page("model", round_forms.go_back, _POST),
        _page("unused", views.unused),
        _page("tokens", views.tokens),
        _page("tokens", forms.make_token, _POST),
        _page("tokens/{number}/revoke", forms.revoke_token, _POST),
        _page("settings", views.settings),
        _page("settings", forms.apply_settings, _POST),
        _page("key", forms.rotate_key, _POST),
        _page("audit", views.audit),
    ]


def _page(path: str, view: View, methods: list[str] | None = None) -> Route:
    """The route of a page. A refusal is shown as a page, too."""

    async def answer(request: Request) -> Response:
        try:
            if inspect.iscoroutinefunction(view):
                return await view(request)  # type: ignore[no-any-return]
            return await run_in_threadpool(view, request)  # type: ignore[arg-type]
        except RefusalError as error:
            return shown(request, "problem.html", error.status, message=str(error))

    return Route(f"{PAGES}{path}", answer, methods=methods or ["GET"])


async def _to_pages(request: Request) -> Response:
    # The path is relative, because a proxy may serve the coordinator below another path.
    return Response(status_code=307, headers=HEADERS | {"Location": PAGES.removeprefix("/")})
