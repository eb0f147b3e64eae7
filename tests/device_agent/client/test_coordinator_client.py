"""The client against real sockets: no server, another program, and every kind of refusal."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import free_port
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import REPLY_LIMIT, RefusedError
from device_agent.formats.protocol.joining import JoinRequest
from device_agent.formats.protocol.rounds import Progress, SubmodelFailure, Work
from device_agent.formats.protocol.transfers import FileOffer
from profiles.errors import AuthorisationError
from refusals import refused
from scripted_http import Answer, Server, answering, follow, link


def request() -> JoinRequest:
    return JoinRequest(name="desk", public_key="", machine={}, timestamp=0, signature="")


def problem(code: str) -> bytes:
    return json.dumps({"code": code, "message": f"Because of {code}."}).encode()


WAIT = b'{"state": "wait", "round": 1, "files": []}'


def test_waits_for_a_coordinator_that_cannot_be_reached(said: list[str]) -> None:
    port = free_port()
    servers: list[Server] = []

    def sleep(seconds: float) -> None:
        if seconds == 4:
            servers.append(Server(port))
            servers[0].answers = lambda method, path: (200, WAIT)

    client, _ = link(f"http://127.0.0.1:{port}/", sleep=sleep)
    assert client.work().state == "wait"
    servers[0].close()
    there = f"Coordinator at http://127.0.0.1:{port}"
    assert said == [
        f"{there} cannot be reached (connection refused); trying again",
        f"{there} answers again after 7 s.",
    ]


def test_gives_up_after_patience_s(said: list[str]) -> None:
    client, slept = link(f"http://127.0.0.1:{free_port()}", patience_s=100)
    with refused("client.unreachable", waited_s=63):
        client.join(request)
    assert slept == [1, 2, 4, 8, 16, 32]
    assert said == [
        f"Coordinator at {client.url} cannot be reached (connection refused); "
        "trying again for up to 1 min 40 s"
    ]


def test_waits_while_the_coordinator_has_a_problem(server: Server, said: list[str]) -> None:
    replies = [(503, b""), (500, b"Internal Server Error"), (200, WAIT)]
    server.answers = lambda method, path: replies.pop(0)
    client, slept = link(server.url)
    assert client.work().state == "wait"
    assert slept == [1, 2]
    assert "has a problem (HTTP 503); trying again" in said[0]


def test_a_join_that_may_have_worked_is_not_repeated(server: Server) -> None:
    server.answers = lambda method, path: (502, b"")
    with refused("client.no-answer-to-join", url=server.url):
        link(server.url)[0].join(request)
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_refused_secret(server: Server, status: int) -> None:
    server.answers = lambda method, path: (status, problem("client.no"))
    with refused("client.no") as caught:
        link(server.url)[0].work()
    assert isinstance(caught.value, AuthorisationError)
    assert str(caught.value) == "Because of client.no."


@pytest.mark.parametrize(("code", "over"), [("round.closed", True), ("update.wrong-shape", False)])
def test_refused_update(server: Server, code: str, over: bool) -> None:
    server.answers = lambda method, path: (409, problem(code))
    with refused(code) as caught:
        link(server.url)[0].send_update(1, b"{}")
    assert isinstance(caught.value, RefusedError)
    assert str(caught.value) == f"Because of {code}."
    assert caught.value.round_over is over


FOREIGN = [
    (200, "text/html", b"<html>Accept our terms"),
    (200, "application/json", b'{"state": "dance"}'),
    (302, "text/html", b"<a href=http://login.lan/>"),
    (401, "text/html", b"<p>"),
    (401, "application/json", b'{"message": "log in"}'),
    (401, "application/json", b'{"code": "unauthorized", "message": "log in"}'),
    (401, "text/html", problem("client.not-authorised")),
    (403, "text/plain", b"blocked"),
    (404, "application/json", b'{"detail": "Not Found"}'),
    (407, "text/html", b"<p>"),
    (511, "text/html", b"<p>"),
]
"""Answers of a network's login page, of proxies and of other services."""


def test_what_stands_between_ends_no_request(
    server: Server, tmp_path: Path, said: list[str]
) -> None:
    data = b"tensors" * 1000
    (tmp_path / "t").write_bytes(data)
    offer = FileOffer(name="a", size=len(data), sha256=hashlib.sha256(data).hexdigest())
    requests: dict[str, tuple[Callable[[CoordinatorClient], object], list[Answer]]] = {
        "work": (lambda client: client.work(), [(200, WAIT)]),
        "leave": (lambda client: client.leave(), [(204, b"")]),
        "report": (
            lambda client: client.report(SubmodelFailure(submodel="s", failures=3, reason="r")),
            [(200, b'{"submodel": null, "round": 0}')],
        ),
        "update": (lambda client: client.send_update(1, b"{}"), [(200, b'{"round": 1}')]),
        "tensors": (
            lambda client: client.send_tensors(1, tmp_path / "t"),
            [(200, b'{"received": 0}'), (204, b"")],
        ),
        "file": (lambda client: client.download(offer, tmp_path / "file"), [(200, data)]),
        "join": (
            lambda client: client.join(request),
            [(200, b'{"device": "d-1", "secret": "s", "submodel": "full"}')],
        ),
    }
    for name, (call, good) in requests.items():
        own = [(status, "application/json", body) for status, body in good]
        for foreign in FOREIGN:
            for position in range(len(good)):
                left = follow(server, [*own[:position], foreign, *own])
                said.clear()
                client, slept = link(server.url, patience_s=60)
                call(client)
                assert (slept, left) == ([1], []), (name, foreign)
                assert [line.rpartition("; ")[2] for line in said] == [
                    "trying again for up to 1 min 0 s",
                    f"Coordinator at {server.url} answers again after 1 s.",
                ]
                assert f"HTTP {foreign[0]}" in said[0] or foreign[0] == 200, said
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize(("status", "kind", "body"), FOREIGN)
def test_a_command_names_what_answered(
    server: Server, status: int, kind: str, body: bytes, said: list[str]
) -> None:
    server.answers = lambda method, path: (status, body)
    server.headers = {"Content-Type": kind}
    for ask in (CoordinatorClient.work, CoordinatorClient.leave):
        client, slept = link(server.url, patience_s=5)
        with refused("client.not-a-coordinator", url=server.url) as error:
            ask(client)
        assert not isinstance(error.value, AuthorisationError)
        assert slept == [1, 2]
    client, slept = link(server.url, patience_s=60)
    with refused("client.not-a-coordinator", url=server.url) as error:
        client.join(request)
    assert f"POST /devices returned HTTP {status}" in str(error.value) or status == 200
    assert slept == [1, 2, 4, 8, 16]
    assert client.join_unanswered
    assert len(said) == 3  # one line for each outage


def test_a_server_that_does_not_speak_http() -> None:
    greeting = b"SSH-2.0-OpenSSH_9.6\r\n"
    with answering(greeting, greeting) as port:
        client, slept = link(f"http://127.0.0.1:{port}", patience_s=1)
        with refused("client.connection-failed", reason="the answer is not HTTP"):
            client.work()
    assert slept == [1]


def test_peek_never_delays_training(server: Server, said: list[str]) -> None:
    away, slept = link(f"http://127.0.0.1:{free_port()}")
    assert (away.peek(), said, slept) == (None, [], [])
    answers = [
        (503, problem("federation.preparing")),
        (401, problem("client.x")),
        (200, b"<html>"),
        (200, WAIT),
    ]
    server.answers = lambda method, path: answers.pop(0)
    client = link(server.url)[0]
    assert [client.peek() for _ in range(4)] == [None, None, None, Work(state="wait", round=1)]


def test_progress_never_delays_training(said: list[str]) -> None:
    client, slept = link(f"http://127.0.0.1:{free_port()}")
    client.progress(Progress(state="training", loss=1.0))
    assert (said, slept) == ([], [])


@pytest.mark.parametrize("status", [200, 403, 409])
@pytest.mark.parametrize("body", [b'{"code":"\xff"}', b'{"code":' * 50_000, b'{"code":"\\ud800"}'])
def test_replies_that_are_not_json(server: Server, status: int, body: bytes) -> None:
    server.answers = lambda method, path: (status, body)
    with refused("client.not-a-coordinator", url=server.url):
        link(server.url, patience_s=0)[0].work()


@pytest.mark.parametrize(
    "change",
    [{"device": "\x1b[2J"}, {"secret": "two words"}, {"secret": ""}, {"submodel": "x" * 999}],
)
def test_a_join_reply_that_cannot_be_stored(server: Server, change: dict[str, str]) -> None:
    reply = json.dumps({"device": "d-1", "secret": "s", "submodel": "full"} | change).encode()
    server.answers = lambda method, path: (200, reply)
    with refused("client.not-a-coordinator", url=server.url):
        link(server.url, patience_s=0)[0].join(request)


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (
            b"HTTP/1.1 302 F\r\nLocation: https://x\r\n\r\n",
            "client.not-a-coordinator",
            "returned HTTP 302 to https://x",
        ),
        (b"HTTP/1.1 204 N\r\n\r\n", "client.not-a-coordinator", "POST /devices"),
        (
            b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,
            "client.connection-failed",
            "the answer is not HTTP",
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Encoding: gzip\r\n\r\nabcd",
            "client.no-answer-to-join",
            "(its answer cannot be decompressed)",
        ),
    ],
)
def test_answers_of_other_programs(answer: bytes, code: str, message: str) -> None:
    with answering(answer) as port, refused(code) as caught:
        link(f"http://127.0.0.1:{port}", patience_s=0)[0].join(request)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        # It may have been cut, so requests other than a join are repeated.
        (b"", "client.no-answer-to-join", "the connection was closed during the handshake"),
        (b"\x15\x03\x01\x00\x02\x02\x28", "client.connection-failed", "handshake failure"),
    ],
)
def test_tls_handshakes_that_fail(answer: bytes, code: str, message: str) -> None:
    with answering(answer) as port, refused(code) as error:
        link(f"https://127.0.0.1:{port}")[0].join(request)
    assert message in str(error.value)
    assert "_ssl.c" not in str(error.value)


def test_a_reply_without_end(server: Server) -> None:
    server.answers = lambda method, path: (200, b"[" * (REPLY_LIMIT + 2))
    answer = f"an answer of more than {REPLY_LIMIT} bytes"
    with refused("client.not-a-coordinator", found=answer):
        link(server.url, patience_s=0)[0].work()


def test_messages_are_stripped_of_control_characters(server: Server) -> None:
    said = json.dumps(
        {"code": "client.no", "message": "\x1b[2JNo.\r\nNever." + "!" * 5000}
    ).encode()
    server.answers = lambda method, path: (403, said)
    with pytest.raises(AuthorisationError) as error:
        link(server.url)[0].work()
    assert str(error.value)[:14] == "[2JNo. Never.!"
    assert len(str(error.value)) == 1000
