"""Wrong credentials: refused before anything else is looked at, and logged at a bounded rate."""

import json
from collections.abc import Callable
from dataclasses import asdict

import pytest
import urllib3

from device_agent.federation.device_keys import DeviceKey
from log_messages import logged
from toolkit.coordinator.http.credential_log import MOST_ADDRESSES, WINDOW_S, CredentialLog
from vector_fleet import MACHINE, Fleet, token

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
    for body, words in ((b"{", "The body is not JSON: "), (b"{}", "body.name: Field required")):
        url = f"{fleet[0].url}/v1/devices"
        answer = urllib3.request("POST", url, body=body, headers=headers)
        assert (answer.status, answer.json()["code"]) == (422, "client.bad-request")
        assert answer.json()["message"].startswith(words)


def test_the_log_names_the_address(fleet: Fleet) -> None:
    # A log of its own: other tests of this federation have used up this minute's line.
    app = fleet[0]._uvicorn.config.app
    app._app.state.credential_log = CredentialLog()  # type: ignore[union-attr]
    with logged("toolkit") as said:
        for _ in range(50):
            headers = {"Authorization": "Bearer guess"}
            urllib3.request("GET", f"{fleet[0].url}/v1/work", headers=headers)
    line = "Refused the credentials of a request from 127.0.0.1 (client.not-authorised)."
    assert said == [line]


class Clock:
    """Calls what is due when the test says that time passes."""

    def __init__(self) -> None:
        self.now, self.due = 0.0, list[tuple[float, Callable[[str], None], str]]()

    def later(self, seconds: float, call: Callable[[str], None], argument: str) -> None:
        self.due.append((self.now + seconds, call, argument))

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        due = [one for one in self.due if one[0] <= self.now]
        self.due = [one for one in self.due if one[0] > self.now]
        for _, call, argument in due:
            call(argument)


def test_one_line_a_minute_for_an_address() -> None:
    log, clock, lines = CredentialLog(), Clock(), list[str]()
    with logged("toolkit", lines):
        for _ in range(4):
            for _ in range(1000):
                log.note("10.0.0.1", "join.unknown-token", clock.later)
            log.note("10.0.0.2", "client.not-authorised", clock.later)
            clock.pass_by(WINDOW_S)
        clock.pass_by(WINDOW_S)
    first = "Refused the credentials of a request from 10.0.0.1 (join.unknown-token)."
    assert [line for line in lines if "10.0.0.1" in line] == [
        first,
        "Refused the credentials of 999 more requests from 10.0.0.1.",
        *["Refused the credentials of 1,000 more requests from 10.0.0.1."] * 3,
    ]
    assert sum("10.0.0.2" in line for line in lines) == 4
    assert clock.due == []  # nothing is kept of addresses that are quiet


def test_many_addresses_share_lines() -> None:
    log, clock, lines = CredentialLog(), Clock(), list[str]()
    with logged("toolkit", lines):
        for number in range(10_000):
            log.note(f"2001:db8::{number:x}", "join.unknown-token", clock.later)
    assert len(lines) == len(clock.due) == MOST_ADDRESSES + 1
    assert "other addresses" in lines[-1]
