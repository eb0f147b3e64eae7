"""The operator's page by an HTTP client: logins, what the pages show, and what strangers get."""

import platform
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import msgspec
import pytest
from starlette.routing import Route

from built_page import OPERATOR_FILES
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import membership
from device_agent.formats.update import RECORD
from made_profiles import full
from operator_pages import built_files, form_token, log_in
from operators import operator
from toolkit.coordinator.http.http_api import create_app
from toolkit.coordinator.operation import operator_sessions
from toolkit.coordinator.server import Server
from vector_fleet import (
    CONFIG,
    assert_soon,
    configured,
    enrol,
    running,
    send,
    send_all,
    send_trained,
    task,
    token,
    trained,
)

HOSTILE = """<script>alert(1)</script>"><img src=x onerror='alert(2)'>"""


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A federation whose first round is over, and whose second one waits for the board."""
    folder = tmp_path_factory.mktemp("fleet")
    page = built_files(folder)
    with running(configured(folder / "c"), page=page) as server:
        links = enrol(server, folder)
        send_all(links, 1, folder)
        send_trained(links["desktop-1"], 2, folder / "second")
        _, record, update = trained(links["desktop-2"], folder / "measured")
        measured = msgspec.structs.replace(record, profile=full())
        (update / RECORD).write_bytes(msgspec.json.encode(measured))
        send(links["desktop-2"], 2, update)
        task(links["board-1"])
        server.links = links  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def stranger(page_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page_server.url, headers={"Accept": "text/html"}) as client:
        yield client


@pytest.fixture
def browser(page_server: Server, stranger: httpx.Client) -> httpx.Client:
    """A client that has logged in."""
    answer = log_in(stranger, page_server.coordinator.operator_token)
    assert (answer.status_code, answer.headers["location"]) == (303, "../operator/")
    return stranger


class Tags(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_login_is_a_cookie_that_no_script_and_no_other_site_gets(
    page_server: Server, stranger: httpx.Client
) -> None:
    front = stranger.get("/")
    assert (front.status_code, front.headers["location"]) == (307, "operator/")
    asked = stranger.get("/operator/")
    assert (asked.status_code, asked.headers["location"]) == (303, "../operator/login")
    assert "Operator's token" in stranger.get("/operator/login").text
    secret = page_server.coordinator.operator_token
    wrong = log_in(stranger, "guess")
    assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
    assert "This is not the operator" in wrong.text
    right = log_in(stranger, f" {secret}\n")
    cookie = right.headers["set-cookie"]
    assert re.fullmatch(r"edgetailor-[0-9a-f]{8}=[\w-]{43}; HttpOnly; SameSite=strict", cookie)
    assert secret not in str(right.headers) + right.text
    page = stranger.get("/operator/")
    assert page.status_code == 200
    assert secret not in page.text
    assert page.headers["cache-control"] == "no-store"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert "unsafe" not in policy
    proxied = log_in(stranger, secret, **{"X-Forwarded-Proto": "https"})
    assert "; Secure" in proxied.headers["set-cookie"]


def test_a_logout_ends_the_login(browser: httpx.Client) -> None:
    cookies = dict(browser.cookies)
    assert browser.post("/operator/logout", data={"form_token": "guess"}).status_code == 403
    assert browser.get("/operator/").status_code == 200
    out = browser.post("/operator/logout", data={"form_token": form_token(browser)})
    assert (out.status_code, out.headers["location"]) == (303, "../operator/login")
    again = httpx.get(browser.base_url.join("/operator/"), cookies=cookies)
    assert again.status_code == 401


def test_forms_of_other_sites_are_refused(page_server: Server, browser: httpx.Client) -> None:
    secret = page_server.coordinator.operator_token
    for headers in (
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ):
        assert log_in(browser, secret, **headers).status_code == 403
        out = {"form_token": form_token(browser)}
        assert browser.post("/operator/logout", data=out, headers=headers).status_code == 403
    assert log_in(browser, secret, Origin=page_server.url).status_code == 303


def test_the_public_view_names_nobody_and_is_closed_by_default(
    tmp_path: Path, stranger: httpx.Client
) -> None:
    closed = stranger.get("/operator/public")
    assert closed.status_code in (303, 401)
    config = configured(tmp_path / "public", f'title = "Leaves"\npublic = true\n{CONFIG}')
    with running(config, page=built_files(tmp_path)) as server:
        links = enrol(server, tmp_path)
        send_all(links, 1, tmp_path)
        assert_soon(lambda: server.coordinator.rounds.done == 1)
        with httpx.Client(base_url=server.url) as anybody:
            page = anybody.get("/operator/public")
            assert page.status_code == 200
            for shown in ("<h1>Leaves</h1>", "Round 2 of 3", "3 devices", "quality-chart"):
                assert shown in page.text
            hidden = [*links, "machine 0", "<form", "Audit log"]
            assert not [word for word in hidden if word in page.text]
            assert anybody.get("/operator/").status_code in (303, 401)
            assert anybody.post("/operator/public").status_code in (401, 403, 405)


def test_only_a_login_opens_the_pages(page_server: Server, stranger: httpx.Client) -> None:
    links: dict[str, CoordinatorClient] = page_server.links  # type: ignore[attr-defined]
    device = str(links["desktop-1"]._pool.headers["Authorization"]).removeprefix("Bearer ")
    app = create_app(page_server.coordinator)
    routes = [
        (
            method,
            route.path.replace(":int", "").format(
                device="board-1", action="remove", name="operator.4e5f.js", number=1
            ),
        )
        for route in app.routes
        if isinstance(route, Route) and route.path.startswith("/operator")
        for method in route.methods or ()
    ]
    assert len(routes) > 10
    log_in(stranger, page_server.coordinator.operator_token)
    [(name, _)] = stranger.cookies.items()
    stranger.cookies.clear()
    operators_token = page_server.coordinator.operator_token
    secrets = ["guess", operators_token, token(page_server.config, "board"), device]
    before = operator(page_server).audit().entries
    for method, path in routes:
        if path.startswith(("/operator/login", "/operator/files/")) or path == "/operator":
            continue
        for secret in secrets:
            bearer = {"Authorization": f"Bearer {secret}", "Cookie": f"{name}={secret}"}
            for accept in ("text/html", "text/event-stream"):
                answer = stranger.request(method, path, headers=bearer | {"Accept": accept})
                assert answer.status_code == (303 if accept == "text/html" else 401)
                assert "board-1" not in answer.text
    assert operator(page_server).audit().entries == before
    made = operator(page_server).add_operator("grafana", "read-only", "shows figures")
    log_in(stranger, made.token)
    assert "<summary>" not in stranger.get("/operator/devices/board-1").text
    for method, path in routes:
        if method != "HEAD" and not path.endswith(("/login", "/events", "logout")):
            allowed = 200 if method == "GET" else 403
            answer = stranger.request(method, path, follow_redirects=True)
            assert answer.status_code == allowed, path
    operator(page_server).revoke_operator("grafana", "no longer")
    assert stranger.get("/operator/").status_code == 303
    stranger.cookies.clear()
    part = stranger.get("/operator/", headers={"HX-Request": "true"})
    assert (part.status_code, part.headers["hx-refresh"]) == (401, "true")


def test_what_the_pages_show(browser: httpx.Client) -> None:
    overview = browser.get("/operator/").text
    assert "Round 2 of 3" in overview
    assert "2 of 3 updates have come. The round needs at least 2." in overview
    assert re.search(r'href="../operator/devices/board-1">board-1</a>', overview)
    assert "0, best" in overview  # its loss is the lower one
    assert "0.5000" in overview
    device = browser.get("/operator/devices/board-1").text
    for text in (
        "trains low-rank:0.5",
        platform.machine(),
        "<dt>Memory</dt>",
        "1 round",
        "2.0000",
        "1.0000",
    ):
        assert text in device, text
    assert "No operator has acted on this device." in device
    assert '<h2 id="measured">' not in device
    measured = browser.get("/operator/devices/desktop-2").text
    assert re.search(r"train</th>.*?400\.00 ms</td>.*?60\.0 MB</td>", measured)
    unknown = browser.get("/operator/devices/bord-1")
    assert unknown.status_code == 404
    assert "did you mean &#39;board-1&#39;?" in unknown.text
    assert "Every update that came is in the model." in browser.get("/operator/unused").text


def test_every_link_leads_somewhere_below_any_prefix(browser: httpx.Client) -> None:
    """A proxy may serve the coordinator below another path, so no link begins at the host."""
    pages = ["", "devices", "devices/board-1", "unused", "tokens", "settings", "audit"]
    for path in pages:
        answer = browser.get(f"/operator/{path}")
        found = {
            link
            for _, attrs in Tags(answer.text).found
            for name in ("href", "src", "hx-get", "data-events")
            if (link := attrs.get(name)) is not None
        }
        assert len(found) > 10
        for link in found - {"#main"}:
            assert not link.startswith("/"), link
            target = answer.url.join(link)
            assert target.path.startswith("/operator"), link
            if not link.endswith("/events"):
                assert browser.get(target, headers={"Accept-Encoding": "br"}).status_code == 200


def listed(browser: httpx.Client, query: str) -> list[str]:
    text = browser.get(f"/operator/devices?{query}").text
    return re.findall(r'<th scope="row"><a href="[^"]*">([^<]*)</a>', text)


def test_devices_are_filtered_and_sorted(browser: httpx.Client) -> None:
    assert listed(browser, "") == ["desktop-1", "desktop-2", "board-1"]
    assert listed(browser, "kind=board") == ["board-1"]
    assert listed(browser, "search=DESK&state=") == ["desktop-1", "desktop-2"]
    assert listed(browser, "sort=device") == ["board-1", "desktop-1", "desktop-2"]
    assert listed(browser, "sort=name&descending=true") == ["board-1", "desktop-2", "desktop-1"]
    assert listed(browser, "sort=trained")[0] == "board-1"
    assert listed(browser, "start=1") == ["desktop-2", "board-1"]
    for wrong in ("start=-1", "sort=x", "start=x", f"search={'x' * 101}"):
        answer = browser.get(f"/operator/devices?{wrong}")
        assert (answer.status_code, 'role="alert"' in answer.text) == (422, True)


def test_names_of_devices_are_no_markup(tmp_path: Path) -> None:
    page = built_files(tmp_path)
    with running(configured(tmp_path / "c"), page=page) as server:
        membership.join(server.url, token(server.config, "board"), HOSTILE[:64], tmp_path / "b")
        operator(server).act("pause", "board-1", HOSTILE)
        with httpx.Client(base_url=server.url) as browser:
            log_in(browser, server.coordinator.operator_token)
            for path in ("", "devices", "devices/board-1", "audit", "unused"):
                text = browser.get(f"/operator/{path}").text
                tags = Tags(text).found
                scripts = [attrs for tag, attrs in tags if tag == "script"]
                assert [attrs["src"] for attrs in scripts] == [
                    f"{'../' * (1 + path.count('/'))}operator/files/operator.4e5f.js"
                ]
                names = {name for _, attrs in tags for name in attrs}
                assert not [name for name in names if name.startswith("on") or name == "style"]
                assert [attrs["src"] for tag, attrs in tags if tag == "img"] == [
                    f"{'../' * (1 + path.count('/'))}operator/files/icon.svg"
                ]
            assert "&lt;script&gt;" in browser.get("/operator/devices").text


def test_the_files_of_the_page(stranger: httpx.Client) -> None:
    script = stranger.get("/operator/files/operator.4e5f.js")
    assert (script.status_code, script.content) == (200, OPERATOR_FILES["operator.4e5f.js"][1])
    assert "immutable" in script.headers["cache-control"]
    assert stranger.get("/operator/files/index.html").status_code == 404


def test_without_built_files_the_page_says_what_to_do(server: Server) -> None:
    answer = httpx.get(f"{server.url}/operator/login")
    assert answer.status_code == 503
    assert "make web" in answer.text


def test_logins_end_after_hours_without_use_and_are_few() -> None:
    now = [0.0]
    sessions = operator_sessions.OperatorSessions(lambda: now[0])
    first = sessions.begin("a")
    now[0] = operator_sessions.UNUSED_S - 1
    assert sessions.find(first) is not None
    now[0] = 2 * operator_sessions.UNUSED_S - 1
    assert sessions.is_open(first)
    now[0] += 1
    assert not sessions.is_open(first)
    assert sessions.find(first) is None
    ids = [sessions.begin("a") for _ in range(operator_sessions.MOST)]
    assert sessions.find(ids[0]) is not None
    sessions.begin("b")
    assert sessions.find(ids[1]) is None
    assert sessions.find(ids[0]) is not None
