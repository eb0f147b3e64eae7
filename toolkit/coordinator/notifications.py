"""Tells the operator's own programs what happens in the federation: the table [notify].

A program gets each event as one JSON object: by a POST request, or on its standard input.
"""

import json
import logging
import math
import queue
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import urllib3
from urllib3.util import parse_url

logger = logging.getLogger(__name__)

EventName = Literal[
    "round-closed",
    "round-stalled",
    "quality-falling",
    "model-taken-back",
    "round-rejected",
    "device-left-out",
    "device-banned",
    "release-made",
    "release-refused",
    "rounds-ended",
]
EVENTS: tuple[EventName, ...] = get_args(EventName)
MOST_WAITING = 1000
"""The most events that wait for a slow receiver. Further events are dropped."""
TIMEOUT_S, ANSWER_S = 10.0, 20.0
"""The longest wait for a byte of a receiver, and for its whole answer."""
COMMAND_TIMEOUT_S = 60.0
PAUSES_S = (1.0, 5.0, 30.0)
"""The pauses before the further attempts of a POST request that failed."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a federation.

    Attributes:
        event: Its name.
        text: One line for people.
        federation: The title in the federation's file.
        round: The round that was open or had just closed.
        time: Seconds since 1970.
        values: Further values, such as the device or the accuracy.
    """

    event: EventName
    text: str
    federation: str
    round: int
    time: float
    values: dict[str, Any] = field(default_factory=dict)
    version: int = 1

    def encoded(self) -> bytes:
        """The event as one JSON object. Numbers that JSON does not have become null."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.values.items()
        }
        return json.dumps(asdict(replace(self, values=values))).encode()


class Notifier:
    """Sends events from a thread of its own, so that no round waits for a receiver.

    Nothing is sent before `start`. An event that cannot be delivered is logged and dropped.

    Args:
        url: The address to which each event is sent by a POST request; None to send none.
        command: The program that is run for each event; empty to run none.
        names: The names of the events that are sent.
        pauses_s: The pauses before further attempts of a request.
    """

    def __init__(
        self,
        url: str | None = None,
        command: Sequence[str] = (),
        names: Sequence[EventName] = EVENTS,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._url, self._command, self._names = url, list(command), frozenset(names)
        self._host = None if url is None else parse_url(url).host  # the path may hold a secret
        self._pauses_s = pauses_s
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._slow: threading.Thread | None = None

    def start(self) -> None:
        """Start to send, if there is a receiver."""
        if self._url or self._command:
            self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Send the events that wait, each with a single attempt, and end the thread."""
        self._stopping.set()
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)

    def send(self, event: Event) -> None:
        """Send `event` soon. Returns immediately; may be called from any thread."""
        if self._thread is None or event.event not in self._names:
            return
        if self._events.qsize() >= MOST_WAITING:
            logger.warning("Too many notifications wait: dropped %s.", event.event)
            return
        self._events.put(event)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            body = event.encoded()
            if self._url:
                self._report(event, self._post(body))
            if self._command:
                self._report(event, self._call(body))

    def _report(self, event: Event, failure: str | None) -> None:
        if failure is not None:
            logger.warning("The notification %s was not delivered: %s", event.event, failure)

    def _post(self, body: bytes) -> str | None:
        """Send `body`, with further attempts. Returns why it failed; None if it succeeded."""
        failure = self._attempt(body)
        for pause in self._pauses_s:
            if failure is None or self._stopping.wait(pause):
                break
            failure = self._attempt(body)
        return failure

    def _attempt(self, body: bytes) -> str | None:
        """Send `body` once. Returns why it failed; None if it succeeded.

        A receiver may send its answer so slowly that no read times out. So the request runs in a
        separate thread. No other request begins before this thread has ended.
        """
        if self._slow is not None and self._slow.is_alive():
            return f"{self._host} still answers an earlier one."
        outcome: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._slow = threading.Thread(
            target=lambda: outcome.put(self._request(body)), name="notification", daemon=True
        )
        self._slow.start()
        try:
            return outcome.get(timeout=ANSWER_S)
        except queue.Empty:
            return f"{self._host} took longer than {ANSWER_S:.0f} s to answer."

    def _request(self, body: bytes) -> str | None:
        headers = {"Content-Type": "application/json", "User-Agent": "edgetailor"}
        assert self._url is not None
        try:
            answer = urllib3.request(
                "POST",
                self._url,
                body=body,
                headers=headers,
                timeout=TIMEOUT_S,
                retries=False,
                redirect=False,
                preload_content=False,  # the receiver decides the length of its answer
            )
            answer.close()
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            return f"{self._host} cannot be reached ({type(error).__name__})."
        return None if answer.status < 300 else f"{self._host} answered {answer.status}."

    def _call(self, body: bytes) -> str | None:
        try:
            done = subprocess.run(
                self._command,
                input=body,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=COMMAND_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"{self._command[0]} failed: it took too long."
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return f"{self._command[0]} failed: {reason}."
        return None if done.returncode == 0 else f"{self._command[0]} ended with {done.returncode}."
