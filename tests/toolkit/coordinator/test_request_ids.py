"""Each request has an id: in its answer, and in the lines of the JSON log that it causes."""

import json
import logging
import re
import threading
from collections.abc import Iterator

import pytest
import urllib3

from device_agent.log_format import JsonFormatter, show_logs
from operators import operator
from toolkit.coordinator.http.request_limits import REQUEST_ID
from vector_fleet import Fleet


@pytest.fixture
def log() -> Iterator[list[dict[str, object]]]:
    lines: list[dict[str, object]] = []
    with show_logs(lambda line: lines.append(json.loads(line)), JsonFormatter()):
        yield lines


def ask(url: str, secret: str, **headers: str) -> urllib3.BaseHTTPResponse:
    given = {"Authorization": f"Bearer {secret}", **headers}
    body = {"reason": "x"}
    return urllib3.request("POST", url, json=body, headers=given)


def test_a_line_names_the_request_that_caused_it(
    new_fleet: Fleet, log: list[dict[str, object]]
) -> None:
    server, _ = new_fleet
    token = server.coordinator.operator_token
    url = f"{server.url}/v1/operator/devices/{{}}/pause"
    answers = {
        name: ask(url.format(name), token, **({REQUEST_ID: given} if given else {}))
        for name, given in (("board-1", "from-a.proxy_7"), ("desktop-1", ""), ("desktop-2", "a b"))
    }
    ids = {name: answer.headers[REQUEST_ID] for name, answer in answers.items()}
    assert ids["board-1"] == "from-a.proxy_7"
    assert all(re.fullmatch("[0-9a-f]{16}", ids[name]) for name in ("desktop-1", "desktop-2"))
    lines = [line for line in log if "is paused by the operator" in str(line["message"])]
    assert {str(line["message"]).split(" ")[0]: line["request"] for line in lines} == ids
    refused = ask(url.format("board-1"), "guess", **{REQUEST_ID: "7"})
    assert (refused.status, refused.headers[REQUEST_ID]) == (401, "7")
    [line] = [line for line in log if "Refused the credentials" in str(line["message"])]
    assert line["request"] == "7"


def test_requests_at_the_same_time_have_their_own_ids(
    new_fleet: Fleet, log: list[dict[str, object]]
) -> None:
    server, _ = new_fleet
    acting = operator(server)
    for number in range(8):
        acting.add_operator(f"o{number}", "read-only", "x")
    url = f"{server.url}/v1/operator/operators/o{{}}/revoke"
    token = server.coordinator.operator_token
    threads = [
        threading.Thread(target=ask, args=(url.format(n), token), kwargs={REQUEST_ID: f"id-{n}"})
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line for line in log if "revokes the token of" in str(line["message"])]
    named = {str(line["message"]).rpartition("o")[2].strip("."): line["request"] for line in lines}
    assert named == {f"{n}": f"id-{n}" for n in range(8)}


def test_other_lines_have_no_id(log: list[dict[str, object]]) -> None:
    logging.getLogger("toolkit").info("a round closes")
    assert "request" not in log[-1]
