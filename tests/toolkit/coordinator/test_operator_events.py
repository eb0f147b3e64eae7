"""Events for open pages: when they come, when they end, and what they cost."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from operator_pages import built_files, form_token, log_in
from operators import operator
from toolkit.coordinator.http.operator_page import events
from toolkit.coordinator.server import Server
from vector_fleet import configured, enrol, running


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(events, "TICK_S", 0.02)
    with running(configured(tmp_path / "c"), page=built_files(tmp_path)) as server:
        enrol(server, tmp_path)
        yield server


@pytest.fixture
def browser(watched: Server) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=100)
    with httpx.Client(base_url=watched.url, timeout=20, limits=limits) as client:
        log_in(client, watched.coordinator.operator_token)
        yield client


def test_an_event_comes_with_each_change_and_the_stream_ends_at_logout(
    watched: Server, browser: httpx.Client
) -> None:
    with browser.stream("GET", "/operator/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines) == "retry: 3000"
        for action in ("pause", "resume"):
            operator(watched).act(action, "board-1", "x")  # type: ignore[arg-type]
            assert "event: changed" in lines
        browser.post("/operator/logout", data={"form_token": form_token(browser)})
        assert "event" not in "".join(lines)


def test_a_revoked_token_ends_its_stream(watched: Server, browser: httpx.Client) -> None:
    made = operator(watched).add_operator("anna", "read-only", "x")
    log_in(browser, made.token)
    with browser.stream("GET", "/operator/events") as answer:
        operator(watched).revoke_operator("anna", "x")
        answer.read()


def test_streams_are_few_need_no_threads_and_do_not_delay_the_end(
    watched: Server, browser: httpx.Client
) -> None:
    before = threading.active_count()
    opened = [
        browser.send(browser.build_request("GET", "/operator/events"), stream=True)
        for _ in range(events.MOST + 1)
    ]
    assert threading.active_count() <= before + 1
    opened[0].read()  # the oldest has ended
    assert browser.get("/operator/").status_code == 200
    watched.stop()
    for answer in opened[1:]:
        answer.read()


def test_a_quiet_stream_is_kept_open(
    watched: Server, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.1)
    with browser.stream("GET", "/operator/events") as answer:
        assert ":" in answer.iter_lines()
