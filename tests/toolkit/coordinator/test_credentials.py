"""Wrong credentials: refused before anything else is looked at, and logged at a bounded rate."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import urllib3

from device_agent.federation.identity.device_keys import DeviceKey
from log_messages import logged
from toolkit.coordinator.http.problem_answers import CREDENTIALS
from toolkit.coordinator.minute_log import MOST, WINDOW_S, MinuteLog
from vector_fleet import MACHINE, Fleet, configured, running, token

WHOLE = json.dumps(asdict(DeviceKey.new().join_request("guess", "x", MACHINE))).encode()
ROUND = f"/rounds/1/tensors/{64 * 'x'}"


@pytest.mark.parametrize("body", [WHOLE, b"", b"{", b"{}", b"[]", b'{"name": 1}', b"\xff"])
@pytest.mark.parametrize("path", ["/devices", "/progress", "/problems", "/rounds/x/update"])
def test_before_the_body_is_validated(fleet: Fleet, path: str, body: bytes) -> None:
    expected = (403, "join.unknown-token") if path == "/devices" else (401, "client.not-authorised")
    for bearer in ("guess", ""):
        headers = {"Authorization": f"Bearer {bearer}", "Content-Type": "application/json"}
        url = f"{fleet[0].url}/v1{path}"
        answer = urllib3.request("POST", url, body=body, headers=headers)
        if not bearer:
            expected = (401, "client.not-authorised")
        assert (answer.status, answer.json()["code"]) == expected


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_before_the_path_is_validated(fleet: Fleet, method: str) -> None:
    headers = {"Authorization": "Bearer guess", "Upload-Offset": "?"}
    answer = urllib3.request(method, f"{fleet[0].url}/v1{ROUND}", headers=headers)
    assert answer.status == 401


def test_a_right_token_is_told_what_is_wrong_with_its_body(fleet: Fleet) -> None:
    headers = {
        "Authorization": f"Bearer {token(fleet[0].config, 'board')}",
        "Content-Type": "application/json",
    }
    for body, words in (
        (b"{", "Expecting property name"),
        (b"{}", "missing required field `name`"),
    ):
        url = f"{fleet[0].url}/v1/devices"
        answer = urllib3.request("POST", url, body=body, headers=headers)
        assert (answer.status, answer.json()["code"]) == (422, "client.bad-request")
        assert answer.json()["message"].startswith("The body of the request cannot be used: ")
        assert words in answer.json()["message"]


def test_the_log_names_the_address(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    # A log of its own: other tests of this federation have used up this minute's line.
    monkeypatch.setattr(fleet[0].coordinator, "minute_log", MinuteLog())
    with logged("toolkit") as said:
        for _ in range(50):
            headers = {"Authorization": "Bearer guess"}
            urllib3.request("GET", f"{fleet[0].url}/v1/work", headers=headers)
    line = "Refused the credentials of a request from 127.0.0.1 (client.not-authorised)."
    assert said == [line]


def test_a_valid_join_token_that_doctor_asks_about_is_not_logged(tmp_path: Path) -> None:
    with running(configured(tmp_path)) as server, logged("toolkit") as said:
        headers = {"Authorization": f"Bearer {token(server.config, 'board')}"}
        answer = urllib3.request("GET", f"{server.url}/v1/status", headers=headers)
        assert (answer.status, answer.json()["code"]) == (401, "client.join-token")
        assert not [line for line in said if "credentials" in line]


def test_one_line_a_minute_for_an_address() -> None:
    now = [0.0]
    log, lines = MinuteLog(lambda: now[0]), list[str]()
    begun: list[str] = []

    def note(who: str) -> None:
        if log.begins(who, CREDENTIALS):
            begun.append(who)

    with logged("toolkit", lines):
        for minute in range(4):
            now[0] = minute * WINDOW_S
            for _ in range(1000):
                note("10.0.0.1")
            note("10.0.0.2")
        for minute in range(4, 9):
            now[0] = minute * WINDOW_S
            log.flush()
    assert lines == [
        "Refused the credentials of 999 more requests from 10.0.0.1.",
        *["Refused the credentials of 1,000 more requests from 10.0.0.1."] * 3,
    ]
    # Whoever was quiet for a minute is named at once again; nothing is kept of who is quiet.
    assert begun == ["10.0.0.1", *["10.0.0.2"] * 4]
    assert not log._windows
    assert not +log._own


def test_many_addresses_share_lines() -> None:
    log = MinuteLog(lambda: 0.0)
    begun = sum(log.begins(f"2001:db8::{number:x}", CREDENTIALS) for number in range(10_000))
    assert begun == len(log._windows) == MOST + 1
    assert log.begins("2001:db8::1", "another kind of event")
