"""Notifications: what a receiver gets, and that no round waits for one that is slow or away."""

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from log_messages import logged
from toolkit.coordinator.notifications import Event, Notifier
from vector_fleet import CONFIG, configured, enrol, running, send_all, task

KEEP = "import sys, pathlib; pathlib.Path(sys.argv[1]).open('ab').write(sys.stdin.buffer.read())"


def event(number: int = 0) -> Event:
    return Event(event="round-closed", text="x", federation="f", round=number, time=0.0)


class Receiver:
    """A web server that keeps what it gets, and first answers with `failures`."""

    def __init__(self, *failures: int) -> None:
        self.bodies: list[dict[str, object]] = []
        self.came = threading.Semaphore(0)
        self.place = "/"
        answers = list(failures)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = answers.pop(0) if answers else 204
                if status == 204:
                    receiver.bodies.append(json.loads(body))
                self.send_response(status)
                self.send_header("Location", receiver.place)
                self.end_headers()
                receiver.came.release()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def wait(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.came.acquire(timeout=60)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    started = Receiver()
    yield started
    started.server.shutdown()
    started.server.server_close()


def test_a_round_is_told_to_the_address_and_to_the_program(
    receiver: Receiver, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    command = json.dumps([sys.executable, "-c", KEEP, str(kept)])
    table = f'[notify]\nurl = "{receiver.url}"\ncommand = {command}\nevents = ["round-closed"]\n'
    config = configured(tmp_path / "fleet", CONFIG.replace("[training]", f"{table}\n[training]"))
    with running(config) as server:
        links = enrol(server, tmp_path / "fleet")
        send_all(links, 1, tmp_path)
        assert task(links["board-1"]).round == 2
        status = server.coordinator.status()
        receiver.wait()
    (told,) = receiver.bodies
    assert told["event"] == "round-closed"
    assert told["round"] == 1
    closed = status.history[-1]
    assert told["values"] == {
        "accuracy": closed.accuracy,
        "loss": closed.loss,
        "updates": 3,
        "left_out": {},
        "limited": {},
    }
    assert str(told["text"]).startswith("Round 1 of 3: ")
    assert json.loads(kept.read_bytes()) == told


def test_a_failed_request_is_repeated() -> None:
    receiver = Receiver(503, 500)
    notifier = Notifier(receiver.url, pauses_s=(0.0, 0.0))
    notifier.start()
    notifier.send(event(7))
    receiver.wait(3)
    notifier.stop()
    receiver.server.shutdown()
    receiver.server.server_close()
    assert [body["round"] for body in receiver.bodies] == [7]


@pytest.mark.parametrize(
    ("url", "command", "reason"),
    [
        ("http://127.0.0.1:9/secret", (), "127.0.0.1 cannot be reached"),
        (None, ("/no/such/program",), "/no/such/program failed: No such file or directory."),
        (None, (sys.executable, "-c", "raise SystemExit(3)"), "ended with 3."),
    ],
)
def test_what_cannot_be_delivered_is_logged(
    url: str | None, command: tuple[str, ...], reason: str
) -> None:
    with logged("toolkit") as messages:
        notifier = Notifier(url, command, pauses_s=())
        notifier.start()
        notifier.send(event())
        notifier.stop()
    (message,) = messages
    assert message.startswith("The notification round-closed was not delivered: ")
    assert reason in message
    assert "secret" not in message


def test_a_receiver_that_hangs_delays_nobody_and_fills_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.coordinator.notifications.MOST_WAITING", 3)
    go, kept = tmp_path / "go", tmp_path / "kept"
    waiting = "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)"
    code = f"import pathlib, sys, time\n{waiting}\n{KEEP}"
    with logged("toolkit") as messages:
        notifier = Notifier(command=(sys.executable, "-c", code, str(kept), str(go)))
        notifier.start()
        for number in range(10):
            notifier.send(event(number))
        dropped = len(messages)
        go.touch()
        notifier.stop()
    assert dropped in (6, 7)  # the first may have left the queue already
    assert kept.read_bytes().count(b"round-closed") == 10 - dropped


def test_a_receiver_that_drips_its_answer_holds_up_no_notification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of the answer comes before each read times out; the answer never ends."""
    monkeypatch.setattr("toolkit.coordinator.notifications.ANSWER_S", 0.3)
    ended, kept = threading.Event(), tmp_path / "kept"

    class Dripping(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.wfile.write(b"HTTP/1.1 204 No Content\r\nX-Long: ")
            while not ended.wait(0.05):
                self.wfile.write(b"x")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Dripping)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    before = threading.active_count()
    with logged("toolkit") as messages:
        command = (sys.executable, "-c", KEEP, str(kept))
        notifier = Notifier(f"http://127.0.0.1:{server.server_port}/", command, pauses_s=(0.0,))
        notifier.start()
        for number in range(3):
            notifier.send(event(number))
        notifier.stop()
        assert kept.read_bytes().count(b"round-closed") == 3
        assert threading.active_count() <= before + 3  # one request, and its answer
    assert len(messages) == 3
    assert "took longer than" in messages[0] or "still answers" in messages[0]
    assert all("127.0.0.1 still answers an earlier one." in one for one in messages[1:])
    ended.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("place", ["http://[", "/elsewhere"])
def test_an_odd_answer_ends_no_notifications(place: str) -> None:
    receiver = Receiver(302)
    receiver.place = place
    with logged("toolkit") as messages:
        notifier = Notifier(receiver.url, pauses_s=())
        notifier.start()
        notifier.send(event(1))
        notifier.send(event(2))
        receiver.wait(2)
        notifier.stop()
    receiver.server.shutdown()
    receiver.server.server_close()
    assert messages == ["The notification round-closed was not delivered: 127.0.0.1 answered 302."]
    assert [body["round"] for body in receiver.bodies] == [2]


def test_numbers_that_json_does_not_have_are_null() -> None:
    told = replace(event(), values={"loss": float("nan"), "accuracy": 0.5})
    assert json.loads(told.encoded())["values"] == {"loss": None, "accuracy": 0.5}


def test_events_that_were_not_asked_for_are_not_sent(receiver: Receiver) -> None:
    notifier = Notifier(receiver.url, names=("round-stalled",))
    notifier.start()
    notifier.send(event())
    notifier.stop()
    assert receiver.bodies == []
