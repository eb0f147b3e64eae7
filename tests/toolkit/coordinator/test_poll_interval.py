"""When devices that wait ask again, as the coordinator says and the agent does."""

import heapq
import random
from collections import Counter
from pathlib import Path

import pytest

from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.polling import LONGEST_ASKED_S, Polling, jittered
from device_agent.federation.run_options import RunOptions
from toolkit.coordinator.rounds.poll_interval import (
    JITTER,
    LONGEST_S,
    REQUESTS_PER_S,
    PollInterval,
)
from toolkit.coordinator.rounds.round_state import Rounds
from vector_fleet import configured, running, token

LEARNS_S = 10


def waiting(devices: int) -> Rounds:
    """Rounds whose first is open and trained by one device, while `devices` wait for the next."""
    rounds = Rounds(total=9, expected=devices + 1, deadline_s=1e9)
    for number in range(devices + 1):
        rounds.enrol(f"device-{number}")
    rounds.open(dict.fromkeys(rounds.devices, "bundle"), now=0)
    for number in range(devices):
        rounds.take(f"device-{number}", 1, "bundle", "update")
    return rounds


@pytest.mark.parametrize(("devices", "opens"), [(1, 0.4), (30, 20.0), (10_000, 31.7)])
def test_a_fleet_asks_rarely_and_learns_of_a_round_soon(devices: int, opens: float) -> None:
    """Every device asks again as it is told, with the agent's jitter, until the round opens."""
    now = 0.0
    asking, rounds = PollInterval(lambda: now), waiting(devices)
    due, asked, heard = [(0.0, number) for number in range(devices)], [], []
    while due:
        now, number = heapq.heappop(due)
        if now >= opens:
            heard.append(now)
            continue
        asked.append(now)
        heapq.heappush(due, (now + jittered(asking.seconds(rounds)), number))
    assert max(heard) - opens < LEARNS_S
    # No second has more than the fleet's share, once the first wait has spread the devices.
    spread = [second for second in map(int, asked) if second >= LONGEST_S]
    busiest = max(Counter(spread).values(), default=0)
    assert busiest < max(2 * REQUESTS_PER_S, 2 * devices)
    if devices == 1:  # a fast fleet is not slowed down
        assert max(heard) - opens < 0.5


def test_waits_grow_with_the_time_that_nothing_happens_and_begin_again() -> None:
    clock = iter((0.0, 0.0, 10.0, 50.0, 5000.0, 5000.1))
    asking, rounds = PollInterval(lambda: next(clock)), waiting(3)
    for wait in (0.25, 1, 5, LONGEST_S):
        assert wait * (1 - JITTER) <= asking.seconds(rounds) <= wait
    rounds.take("device-3", 1, "bundle", "update")
    rounds.close()
    assert asking.seconds(rounds) <= 0.25


def test_the_agent_asks_when_the_coordinator_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 5:
            raise KeyboardInterrupt

    with running(configured(tmp_path / "c")) as server:
        monkeypatch.setattr(server.coordinator.poll_interval, "seconds", lambda rounds: 7.0)
        join(server.url, token(server.config, "desktop"), "desk", tmp_path / "a")
        data = str(server.config.held_out)
        with pytest.raises(KeyboardInterrupt):
            round_loop.run(RunOptions(data=data, state=tmp_path / "a"), sleep=sleep)
    assert all(5.6 <= one <= 8.4 for one in waits[:5])  # then it says that it stops


@pytest.mark.parametrize(
    ("asked", "waits"),
    [(0, [0.25, 0.5, 1, 2, 2]), (-1, [0.25, 0.5]), (3, [3, 3]), (1e300, [LONGEST_ASKED_S])],
)
def test_what_an_agent_makes_of_the_time_asked_for(asked: float, waits: list[float]) -> None:
    slept: list[float] = []
    polling = Polling(slept.append)
    for _ in waits:
        polling.wait(asked)
    assert slept == waits


def test_polls_do_not_move_the_generator_that_recordings_watch() -> None:
    """A recording in another thread would take it for a draw of the model, and refuse the model."""
    before = random.getstate()
    PollInterval(lambda: 0.0).seconds(waiting(3))
    jittered(1.0)
    assert random.getstate() == before
