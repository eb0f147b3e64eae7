"""Answers that are cut anywhere: the request is repeated, with the usual waits."""

import hashlib
import ssl
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from urllib3.exceptions import SSLError

from device_agent.client.client_errors import is_lasting
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.protocol.transfers import FileOffer
from scripted_http import answering, link

BODY = b'{"state": "wait", "round": 12, "files": []}'
PROBLEM = b'{"code": "round.closed", "message": "Round 1 is closed."}'
FILE = b"\r\n\r\n0\r\n\r\n" * 5


def head(status: str, *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "date: Sun, 22 Nov 2026 12:00:00 GMT", *more]
    return "\r\n".join([*lines, "", ""]).encode()


JSON = "Content-Type: application/json"


def sized(status: str, body: bytes, *more: str) -> bytes:
    return head(status, f"Content-Length: {len(body)}", *more) + body


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))
    return head("200 OK", "Transfer-Encoding: chunked") + body


def cut(answer: bytes, whole: int) -> Iterator[tuple[bytes, CoordinatorClient, list[float]]]:
    """A client for each way to cut `answer` before its byte `whole`; then it comes in full."""
    parts = [answer[:end] for end in range(whole)]
    with answering(*chain.from_iterable((part, answer) for part in parts)) as port:
        for part in parts:
            yield part, *link(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "answer",
    [
        sized("200 OK", BODY),
        head("200 OK") + BODY,  # ends with the connection
        chunked(BODY[:20], BODY[20:]),
        head("100 Continue") + sized("200 OK", BODY),
    ],
)
def test_answers_cut_at_every_byte(answer: bytes) -> None:
    whole = answer.index(BODY[20:]) + len(BODY[20:])
    for part, client, slept in cut(answer, whole):
        assert client.work() == Work(state="wait", round=12), part
        assert slept == [1], part


@pytest.mark.parametrize(
    "answer", [sized("409 Conflict", PROBLEM, JSON), head("409 Conflict", JSON) + PROBLEM]
)
def test_refusals_cut_at_every_byte(answer: bytes) -> None:
    for part, client, slept in cut(answer, len(answer)):
        with pytest.raises(RefusedError) as caught:
            client.send_update(1, b"{}")
        assert (caught.value.code, slept) == ("round.closed", [1]), part


def test_an_answer_without_a_body_cut_at_every_byte() -> None:
    answer = head("204 No Content")
    for part, client, slept in cut(answer, len(answer)):
        client.leave()
        assert slept == [1], part


@pytest.mark.parametrize("answer", [sized("200 OK", FILE), head("200 OK") + FILE, chunked(FILE)])
def test_files_cut_at_every_byte(answer: bytes, tmp_path: Path) -> None:
    offer = FileOffer(name="a", size=len(FILE), sha256=hashlib.sha256(FILE).hexdigest())
    whole = answer.index(FILE) + len(FILE)
    for part, client, slept in cut(answer, whole):
        client.download(offer, tmp_path / "a")
        assert (tmp_path / "a").read_bytes() == FILE, part
        assert slept == [1], part


def test_only_a_tls_connection_that_was_cut_is_no_lasting_problem() -> None:
    assert not is_lasting(SSLError(ssl.SSLEOFError(8, "EOF occurred in violation of protocol")))
    assert is_lasting(SSLError(ssl.SSLCertVerificationError(1, "self-signed certificate")))
