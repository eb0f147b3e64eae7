"""What a browser gets from `/join/`: the right bytes under the right headers, or a sentence."""

import gzip
import tracemalloc
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import urllib3
from starlette.applications import Starlette
from starlette.testclient import TestClient

from built_page import FILES, brotli, build_page
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.formats.protocol.problems import PREPARING
from toolkit.coordinator.http.server_socket import answer_preparing, bind
from toolkit.web.built_page import read_page
from toolkit.web.static_files import SECURITY, join_routes
from vector_fleet import configured, running

INDEX, SCRIPT, WASM = FILES
BODY = 64 << 20
"""Bytes of a body that nobody asked for."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    page = read_page(build_page(tmp_path_factory.mktemp("built")))
    with TestClient(Starlette(routes=join_routes(page))) as client:
        yield client


def get(browser: TestClient, path: str, accepted: str | None, **headers: str) -> httpx.Response:
    """The answer to a request whose Accept-Encoding is `accepted`, with the body as it was sent."""
    given = {key.replace("_", "-"): value for key, value in headers.items()}
    request = browser.build_request("GET", path, headers=given)
    del request.headers["accept-encoding"]
    if accepted is not None:
        request.headers["accept-encoding"] = accepted
    answer = browser.send(request, stream=True, follow_redirects=False)
    answer._content = b"".join(answer.iter_raw())
    return answer


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip, deflate, br, zstd", "br"),
        ("gzip, deflate", "gzip"),
        ("GZIP;q=0.5, br;q=0", "gzip"),
        ("br;q=0.0, gzip;q=0", None),
        ("*", "br"),
        ("*;q=0, identity", None),
        ("brotli", None),
        ("", None),
        (None, None),
    ],
)
def test_the_smallest_coding_that_is_accepted(
    browser: TestClient, accepted: str | None, coding: str | None
) -> None:
    kind, data, _ = FILES[SCRIPT]
    sent = {"br": brotli(data), "gzip": gzip.compress(data), None: data}[coding]
    answer = get(browser, f"/join/{SCRIPT}", accepted)
    assert answer.status_code == 200
    assert answer.headers.get("content-encoding") == coding
    assert gzip.decompress(answer.content) == data if coding == "gzip" else answer.content == sent
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["content-type"] == kind
    assert answer.headers["vary"] == "Accept-Encoding"


@pytest.mark.parametrize("accepted", ["gzip", "br;q=0", None])
def test_a_file_with_brotli_only_and_a_client_without_it(
    browser: TestClient, accepted: str | None
) -> None:
    answer = get(browser, f"/join/{WASM}", accepted)
    assert (answer.status_code, answer.json()["code"]) == (406, "client.no-brotli")
    assert WASM in answer.json()["message"]
    assert get(browser, f"/join/{WASM}", "br").content == brotli(FILES[WASM][1])


def test_the_index_and_the_way_to_it(browser: TestClient) -> None:
    answer = get(browser, "/join", "br")
    assert (answer.status_code, answer.headers["location"]) == (308, "join/")
    assert str(answer.url.join(answer.headers["location"])).endswith("/join/")
    for path in ("/join/", "/join/index.html"):
        assert get(browser, path, None).content == FILES[INDEX][1]


def test_caching(browser: TestClient) -> None:
    script = get(browser, f"/join/{SCRIPT}", "br")
    assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
    index = get(browser, "/join/", "br")
    assert index.headers["cache-control"] == "no-cache"
    tag = index.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        same = get(browser, "/join/", "br", if_none_match=known)
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
        assert same.headers["cache-control"] == "no-cache"
    # The same file in another coding is another sequence of bytes.
    assert get(browser, "/join/", "gzip", if_none_match=tag).status_code == 200
    assert get(browser, "/join/", "br", if_none_match='"other"').status_code == 200


@pytest.mark.parametrize("path", ["/join/", f"/join/{WASM}", "/join/nothing", "/join"])
def test_every_answer_has_the_security_headers(browser: TestClient, path: str) -> None:
    answer = get(browser, path, "br")
    assert {key: answer.headers.get(key) for key in SECURITY} == SECURITY
    policy = dict(rule.split(" ", 1) for rule in SECURITY["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == "'self' 'wasm-unsafe-eval'"
    assert policy["connect-src"] == "'self'"
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert answer.headers["cross-origin-embedder-policy"] == "require-corp"


@pytest.mark.parametrize(
    "name", ["files.json", f"{SCRIPT}.br", "../built_page.py", "%2e%2e/built_page.py", "a/b", "%00"]
)
def test_only_listed_files(browser: TestClient, name: str) -> None:
    answer = get(browser, f"/join/{name}", "br")
    assert answer.status_code == 404
    if "../" not in name:  # the client resolves these itself
        assert answer.json()["code"] == "client.no-such-route"


def test_only_get_and_head(browser: TestClient) -> None:
    head = browser.head(f"/join/{SCRIPT}", headers={"Accept-Encoding": "br"})
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(brotli(FILES[SCRIPT][1])))
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert browser.request(method, "/join/").status_code == 405


def test_without_a_built_page() -> None:
    with TestClient(Starlette(routes=join_routes(None))) as browser:
        answer = browser.get("/join/")
        assert answer.status_code == 503
        assert "<code>make web</code>" in answer.text
        assert {key: answer.headers.get(key) for key in SECURITY} == SECURITY
        assert browser.get(f"/join/{SCRIPT}").status_code == 404


def test_the_coordinator_serves_it_beside_its_routes(tmp_path: Path) -> None:
    """Over a real socket: no credentials, nothing in the API's document."""
    config = configured(tmp_path)
    page = read_page(build_page(tmp_path / "built"))
    with running(config, page=page) as server:
        answer = urllib3.request("GET", f"{server.url}/join/{SCRIPT}", decode_content=False)
        assert (answer.status, answer.data) == (200, FILES[SCRIPT][1])
        head = urllib3.request("HEAD", f"{server.url}/join/{SCRIPT}")
        assert (head.status, head.data, head.headers["Content-Length"]) == (
            *(200, b""),
            str(len(FILES[SCRIPT][1])),
        )
        refused = urllib3.request("DELETE", f"{server.url}/join/")
        assert (refused.status, refused.json()["code"]) == (405, "client.no-such-route")
        document = urllib3.request("GET", f"{server.url}/openapi.json").json()
        assert not any(path.startswith("/join") for path in document["paths"])
        operator = CoordinatorClient(
            server.url, (config.state / "operator.token").read_text().strip()
        )
        assert operator.status().state == "enrolling"


def test_the_body_of_a_get_is_thrown_away(tmp_path: Path) -> None:
    """It has no meaning (RFC 9110, section 9.3.1), and nobody has shown credentials for its memory.

    A server may answer and read on, or close the connection. The next request is answered.
    """
    page = read_page(build_page(tmp_path / "built"))
    piece = bytes(1 << 16)
    with running(configured(tmp_path), page=page) as server:
        address = urlsplit(server.url)
        connection = HTTPConnection(address.hostname, address.port)
        tracemalloc.start()
        try:
            headers = {"Content-Length": str(BODY)}
            pieces = (piece for _ in range(BODY // len(piece)))
            connection.request("GET", "/join/", pieces, headers)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, FILES[INDEX][1])
        except ConnectionError:
            connection.close()
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < BODY / 8
        connection.request("GET", "/join/")
        assert connection.getresponse().read() == FILES[INDEX][1]
        connection.close()


def test_a_coordinator_that_is_starting(tmp_path: Path) -> None:
    """The page comes, over connections that do not outlive the start."""
    page = read_page(build_page(tmp_path / "built"))
    listening = bind("127.0.0.1", 0, tmp_path / "fleet.toml")
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with listening, answer_preparing(listening, page=page):
        for path, name in (("/join/", INDEX), (f"/join/{SCRIPT}", SCRIPT)):
            answer = urllib3.request("GET", url + path)
            assert (answer.status, answer.data) == (200, FILES[name][1])
            assert answer.headers["Connection"] == "close"
            assert answer.headers["Content-Security-Policy"] == SECURITY["Content-Security-Policy"]
        for path in ("/v1/work", "/"):
            answer = urllib3.request("GET", url + path, retries=False)
            assert (answer.status, answer.json()["code"]) == (503, PREPARING)
    listening = bind("127.0.0.1", 0, tmp_path / "fleet.toml")
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with listening, answer_preparing(listening):
        assert urllib3.request("GET", f"{url}/join/", retries=False).status == 503


def test_a_federation_without_phones(tmp_path: Path) -> None:
    config = configured(tmp_path)
    without = config.model_copy(update={"phones": False})
    for served, status in ((config, 503), (without, 404)):
        with running(served) as server:
            assert urllib3.request("GET", f"{server.url}/join/", retries=False).status == status
