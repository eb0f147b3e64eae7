"""An agent goes through a day of faults without ending: networks, proxies, clocks and servers.

The sockets are real. The agent's sleep moves a clock in place of waiting, so the day takes seconds.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
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


def answer(status: str, body: str = "<html>Log in</html>", kind: str = "text/html") -> Fault:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return Fault(answer=f"{head}Location: http://login.lan/\r\n\r\n{body}".encode())


JSON = "application/json"
NETWORK = {
    "portal": answer("200 OK"),
    "redirect": answer("302 Found"),
    "proxy login": answer("407 Proxy Authentication Required"),
    "network login": answer("511 Network Authentication Required"),
    "another service": answer("404 Not Found", '{"detail": "Not Found"}', JSON),
    "another login": answer("401 Unauthorized", '{"code": "no", "message": "Log in."}', JSON),
    "a firewall": answer("403 Forbidden"),
    "a proxy without its server": answer("502 Bad Gateway"),
    "another interface": answer("200 OK", '{"state": "unknown"}', JSON),
    "not HTTP": Fault(answer=b"SSH-2.0-OpenSSH_9.6\r\n"),
    "nothing": Fault(up=0, reset=True),
    "truncated headers": Fault(down=30),
    "truncated bodies": Fault(down=150),
}
CLOCK = {"years behind": -YEARS, "years ahead": YEARS}
AWAY = "coordinator away"
FAULTS = ["clock from 1970", *NETWORK, *CLOCK, AWAY]


@dataclass
class Day:
    """The agent's time, and the fault that it meets until it has slept for so long."""

    lasts_s: float

    carried: Carried = field(default_factory=Carried)
    now: float = 60.0  # a board without a clock battery
    synchronised: bool = False
    fault: Fault = field(default_factory=Fault)
    until: float | None = 0.5 * HOUR
    slept_s: float = 0.0
    mend: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        time.sleep(0.002)
        self.now, self.slept_s = self.now + seconds, self.slept_s + seconds
        if self.until is not None and self.slept_s >= self.until:
            self.mend()
            self.fault, self.mend = Fault(), lambda: None
            self.now, self.synchronised = time.time(), True
            self.carried.end_all()
            self.until = None

    def begin(self, name: str) -> None:
        """The fault `name` begins."""
        self.fault = NETWORK.get(name, Fault())
        if name in CLOCK:
            self.now, self.synchronised = time.time() + CLOCK[name], False
        self.until = self.slept_s + self.lasts_s
        self.carried.end_all()


@pytest.mark.parametrize(("while_training", "hours"), [(False, 0.5), (True, 0.25)])
def test_a_day_of_faults(
    tmp_path: Path, said: list[str], while_training: bool, hours: float
) -> None:
    """Each fault begins while the agent waits, or while it trains and then has to send."""
    text = CONFIG[: CONFIG.index("[[devices]]")].replace("rounds = 3", f"rounds = {len(FAULTS)}")
    config = configured(tmp_path / "c", text + KIND)
    day = Day(hours * HOUR)
    servers, ended, begun = list[Server](), list[object](), list[str]()
    stack = ExitStack()

    def serve() -> None:
        servers.append(stack.enter_context(running(config, VectorModel())))

    def begin(name: str) -> None:
        begun.append(name)
        if name == AWAY:
            stack.close()
            day.mend = serve
        day.begin(name)

    def train(folder: Path, *arguments: object, **options: object) -> object:
        if while_training and len(begun) < len(FAULTS):
            begin(FAULTS[len(begun)])
        return train_vector(folder, *arguments, **options)  # type: ignore[arg-type]

    def agent() -> None:
        options = RunOptions(data=str(config.held_out), state=tmp_path / "board")
        clock = Clock(lambda: day.now, lambda: day.synchronised)
        try:
            ended.append(round_loop.run(options, train=train, sleep=day.sleep, clock=clock))
        except BaseException as error:
            ended.append(error)

    def has_come(round_: int) -> bool:
        rounds = servers[-1].coordinator.rounds
        return bool(ended) or (rounds.round == round_ and bool(rounds.updates))

    begun.append(FAULTS[0])
    serve()
    with stack, proxy(lambda: servers[-1].url, lambda: day.fault) as (url, day.carried):
        bearer = full_token(config, "board")
        join(url, bearer, "board", tmp_path / "board")
        other = join(servers[0].url, bearer, "other", tmp_path / "other")
        day.carried.end_all()
        thread = threading.Thread(target=agent, daemon=True)
        thread.start()
        for round_ in range(1, len(FAULTS) + 1):
            assert_soon(partial(has_come, round_), 60)
            assert ended in ([], [len(FAULTS)]), (round_, begun, said[-5:])
            if not while_training and round_ < len(FAULTS):
                begin(FAULTS[round_])
            assert_soon(lambda: day.until is None or bool(ended), 60)
            link = CoordinatorClient(servers[-1].url, other.secret, patience_s=5)
            send(link, round_, trained(link, tmp_path / str(round_))[2])
        thread.join(60)
        status = servers[-1].coordinator.status()
    assert ended == [len(FAULTS)]
    assert begun == FAULTS
    assert [result.updates for result in status.history] == [0] + [2] * len(FAULTS)
    assert day.slept_s > len(NETWORK) * day.lasts_s
    outages = [line for line in said if line.endswith("; trying again")]
    # A line when an outage begins and one after an hour of it, whatever it is. A clock that is
    # ahead may keep nothing from working.
    assert len(NETWORK) <= len(outages) <= 3 * len(FAULTS), outages
