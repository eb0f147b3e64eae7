"""An agent goes through a day of faults without ending: networks, proxies, clocks and servers.

The sockets are real. The agent's sleep moves a clock in place of waiting, so the day takes seconds.
"""

import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from device_agent.system.clock import Clock
from faulty_proxy import Carried, Fault, proxy
from toolkit.coordinator.server import Server
from vector_fleet import (
    CONFIG,
    VectorModel,
    assert_soon,
    configured,
    full_token,
    running,
    send,
    train_vector,
    trained,
)

HOUR = 3600.0
YEARS = 10 * 365 * 24 * HOUR
KIND = '[[devices]]\nname = "board"\nsubmodel = "full"\ncount = 2\n'
JSON = "application/json"


def answer(status: str, body: str = "<html>Log in</html>", kind: str = "text/html") -> Fault:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    head += "Connection: close\r\n"  # the proxy closes it after the answer
    return Fault(answer=f"{head}Location: http://login.lan/\r\n\r\n{body}".encode())


@dataclass(frozen=True)
class Trouble:
    """What happens for a time.

    Attributes:
        line: What the agent's log says of it, as a pattern.
        fault: What every new connection meets.
        behind_s: How far the device's clock, which nobody has set, is behind.
        first_s: What this clock says when it is first looked at, in seconds since 1970.
        away: The coordinator is not running.
    """

    line: str
    fault: Fault | None = None
    behind_s: float = 0.0
    first_s: float | None = None
    away: bool = False

    @property
    def of_clock(self) -> bool:
        return bool(self.behind_s) or self.first_s is not None


OTHER = r"another program answers \(.*"
FAULTS = {
    "clock from 1970": Trouble("clock says 1970-01-01 00:01", first_s=60),
    "portal": Trouble(OTHER + "JSON is malformed", answer("200 OK")),
    "redirect": Trouble(OTHER + "302 to http://login.lan/", answer("302 Found")),
    "proxy login": Trouble(OTHER + "HTTP 407", answer("407 Proxy Authentication Required")),
    "network login": Trouble(OTHER + "HTTP 511", answer("511 Network Authentication Required")),
    "another service": Trouble(
        OTHER + "HTTP 404", answer("404 Not Found", '{"detail": "Not Found"}', JSON)
    ),
    "another login": Trouble(
        OTHER + "HTTP 401",
        answer("401 Unauthorized", '{"code": "no", "message": "Log in."}', JSON),
    ),
    "a firewall": Trouble(OTHER + "HTTP 403", answer("403 Forbidden")),
    "a proxy without its server": Trouble("HTTP 502", answer("502 Bad Gateway")),
    "another interface": Trouble(
        OTHER + "(Object|Invalid)", answer("200 OK", '{"state": "unknown"}', JSON)
    ),
    "not HTTP": Trouble("answer is not HTTP", Fault(answer=b"SSH-2.0-OpenSSH_9.6\r\n")),
    "nothing": Trouble("connection (reset|was closed)", Fault(up=0, reset=True)),
    "truncated headers": Trouble("connection was closed", Fault(down=30)),
    "truncated bodies": Trouble("broke off", Fault(half_body=True)),
    "years behind": Trouble("clock says 2", behind_s=YEARS),
    "years ahead": Trouble("is too old: it was signed at", behind_s=-YEARS),
    "coordinator away": Trouble("connection (reset|was closed)", away=True),
}
NAMES = list(FAULTS)


@dataclass
class Day:
    """The agent's time and its faults.

    A fault begins while the agent makes no request. It lasts until the agent has met it and has
    slept for `lasts_s` seconds, so a slow machine meets every fault.
    """

    said: list[str]
    lasts_s: float

    carried: Carried = field(default_factory=Carried)
    slept_s: float = 0.0
    coming: str | None = None
    begun: dict[str, int] = field(default_factory=dict)
    """How many lines the log had when each fault began."""
    over: set[str] = field(default_factory=set)
    present: Trouble | None = None
    met: int = 0
    until: float = 0.0
    stop: Callable[[], object] = lambda: None
    """Stops the coordinator."""
    start: Callable[[], object] = lambda: None

    def now(self) -> float:
        if self.present is None:
            return time.time()
        if self.present.first_s is not None and not self.met:
            self.present = replace(self.present, behind_s=time.time() - self.present.first_s)
        self.met += self.present.of_clock
        return time.time() - self.present.behind_s

    def synchronised(self) -> bool:
        return self.present is None or not self.present.of_clock

    def plan(self) -> Fault:
        """What the next connection meets."""
        if self.present is None:
            return Fault()
        self.met += self.present.away or self.present.fault is not None
        return self.present.fault or Fault()

    def begin(self, name: str) -> None:
        """The fault `name` begins, for the next request too."""
        self.begun[name] = len(self.said)
        self.met, self.until = 0, self.slept_s + self.lasts_s
        if FAULTS[name].away:
            self.stop()
        self.present = FAULTS[name]
        self.carried.end_all()

    def sleep(self, seconds: float) -> None:
        """In place of the agent's sleep."""
        time.sleep(0.002)
        self.slept_s += seconds
        if self.present is not None and self.met and self.slept_s >= self.until:
            if self.present.away:
                self.start()
            self.present = None
            self.carried.end_all()
            self.over.add(list(self.begun)[-1])
        if self.coming is not None:
            name, self.coming = self.coming, None
            self.begin(name)


@pytest.mark.parametrize("while_training", [False, True])
def test_a_day_of_faults(tmp_path: Path, said: list[str], while_training: bool) -> None:
    """Each fault begins while the agent waits, or while it trains and then has to send."""
    text = CONFIG[: CONFIG.index("[[devices]]")].replace("rounds = 3", f"rounds = {len(FAULTS)}")
    config = configured(tmp_path / "c", text + KIND)
    day = Day(said, HOUR / 6)
    servers, ended = list[Server](), list[object]()
    stack = ExitStack()

    def serve() -> None:
        servers.append(stack.enter_context(running(config, VectorModel())))

    def train(folder: Path, *arguments: object, **options: object) -> object:
        if while_training and len(day.begun) < len(FAULTS):
            day.begin(NAMES[len(day.begun)])
        return train_vector(folder, *arguments, **options)  # type: ignore[arg-type]

    def agent() -> None:
        options = RunOptions(data=str(config.held_out), state=tmp_path / "board")
        clock = Clock(day.now, day.synchronised)
        try:
            ended.append(round_loop.run(options, train=train, sleep=day.sleep, clock=clock))
        except BaseException as error:
            ended.append(error)

    def has_come(round_: int) -> bool:
        rounds = servers[-1].coordinator.rounds
        return bool(ended) or (rounds.round == round_ and bool(rounds.updates))

    day.stop, day.start = stack.close, serve
    serve()
    with stack, proxy(lambda: servers[-1].url, day.plan) as (url, day.carried):
        bearer = full_token(config, "board")
        join(url, bearer, "board", tmp_path / "board")
        other = join(servers[0].url, bearer, "other", tmp_path / "other")
        day.begin(NAMES[0])
        thread = threading.Thread(target=agent, daemon=True)
        thread.start()
        for round_, name in enumerate([*NAMES[1:], None], 1):
            assert_soon(partial(has_come, round_), 60)
            assert ended in ([], [len(FAULTS)]), (round_, day.begun, said[-5:])
            if name is not None:
                if not while_training:
                    day.coming = name
                # A wrong clock is met when the next round opens; the rest has to be over before.
                awaited = day.begun if FAULTS[name].of_clock else day.over
                assert_soon(lambda name=name, awaited=awaited: name in awaited or bool(ended), 60)
            link = CoordinatorClient(servers[-1].url, other.secret, patience_s=5)
            send(link, round_, trained(link, tmp_path / str(round_))[2])
        thread.join(60)
        status = servers[-1].coordinator.status()
    assert ended == [len(FAULTS)]
    assert [result.updates for result in status.history] == [0] + [2] * len(FAULTS)
    assert list(day.begun) == NAMES
    assert day.over == set(NAMES)
    assert day.slept_s > len(FAULTS) * day.lasts_s
    for name, lines in zip(NAMES, pairwise([*day.begun.values(), len(said)]), strict=True):
        outages = [line for line in said[slice(*lines)] if line.endswith("; trying again")]
        # One line when the outage begins, and none for each attempt. A second one is possible: the
        # coordinator may end an idle connection just when the agent uses it again.
        assert 1 <= len(outages) <= 2, (name, outages)
        assert re.search(FAULTS[name].line, outages[0]), (name, outages)
