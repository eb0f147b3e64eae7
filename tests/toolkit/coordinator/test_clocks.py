"""Devices whose clock is wrong wait for it, say so once and go on; none ends or is locked out."""

import datetime
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from device_agent.system.clock import RELEASED_S, Clock
from refusals import refused
from toolkit.coordinator.server import Server
from vector_fleet import CONFIG, assert_soon, configured, full_token, running, train_vector

ONE = CONFIG[: CONFIG.index("[[devices]]")] + '[[devices]]\nname = "board"\nsubmodel = "full"\n'
NOW = 1_900_000_000
DAY = 86400
CHANGELOG = Path(__file__).resolve().parents[3] / "CHANGELOG.md"


@dataclass
class Board:
    """A board: its clock, the times that it sleeps, and what happens meanwhile."""

    now: float
    synchronised: bool = False
    after: Callable[["Board"], None] = lambda board: None
    train: Callable[..., object] = train_vector
    slept_s: float = 0.0
    sleeps: int = 0

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.synchronised)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept_s += seconds
        self.sleeps += 1
        assert self.sleeps < 2000, "it waits for ever"
        time.sleep(0.002)  # the coordinator works meanwhile
        self.after(self)

    def run(self, server: Server, state: Path) -> int:
        options = RunOptions(data=str(server.config.held_out), state=state)
        return round_loop.run(options, train=self.train, sleep=self.sleep, clock=self.clock)


def set_after(seconds: float, now: float, synchronised: bool = True) -> Callable[[Board], None]:
    """What sets the clock of a board to `now` when it has slept for some seconds."""
    done = list[bool]()

    def after(board: Board) -> None:
        if board.slept_s >= seconds and not done:
            done.append(True)
            board.now, board.synchronised = now, synchronised

    return after


def joined(tmp_path: Path, server: Server) -> Path:
    join(server.url, full_token(server.config, "board"), "one", tmp_path / "one")
    server.coordinator.wall_clock = lambda: NOW
    assert_soon(lambda: server.coordinator.status().state == "training")
    return tmp_path / "one"


def of_clocks(said: list[str]) -> list[str]:
    return [line for line in said if "clock" in line or "trusted" in line]


@pytest.mark.parametrize(
    ("begins", "newest", "text"),
    [
        (60.0, 0, "This device's clock says 1970-01-01 00:01 UTC, but the work"),
        (NOW - 3 * DAY, NOW - DAY, "This device's clock says 2030-03-14 17:46 UTC, but the work"),
        (NOW + 5000 * DAY, 0, "This device's clock says 2043-"),  # years ahead
    ],
)
def test_a_board_waits_until_its_clock_is_set(
    tmp_path: Path, said: list[str], begins: float, newest: int, text: str
) -> None:
    with running(configured(tmp_path / "c", ONE)) as server:
        state = joined(tmp_path, server)
        if newest:
            (state / "newest-work").write_text(f"{newest}\n")
        board = Board(begins, after=set_after(600, NOW))
        notes: set[str | None] = set()
        set_clock = board.after

        def after(board: Board) -> None:
            notes.add(server.coordinator.status().devices[0].note)
            set_clock(board)

        board.after = after
        assert board.run(server, state) == 3
    first, last = of_clocks(said)
    assert text in first
    assert first.endswith("; trying again")
    # Waits are randomly longer or shorter, so the last request before 10 minutes may be the last.
    assert re.fullmatch(
        r"The coordinator sends work that can be trusted again after (9|1\d) min \d+ s\.", last
    )
    assert any(note and note.startswith(first[:40]) for note in notes)


def test_a_clock_that_nobody_sets_costs_nearly_nothing(tmp_path: Path, said: list[str]) -> None:
    class EnoughError(Exception):
        pass

    def stop(board: Board) -> None:
        if board.slept_s > 3 * 3600:
            raise EnoughError

    with running(configured(tmp_path / "c", ONE)) as server:
        state, board = joined(tmp_path, server), Board(60.0, after=stop)
        with pytest.raises(EnoughError):
            board.run(server, state)
    assert board.sleeps < 240  # 3 hours, a question a minute
    assert len(of_clocks(said)) <= 4  # one line an hour


def test_a_board_that_was_off_for_long_and_has_no_time_service(
    tmp_path: Path, said: list[str]
) -> None:
    with running(configured(tmp_path / "c", ONE)) as server:
        state = joined(tmp_path, server)
        (state / "newest-work").write_text(f"{NOW - 6 * DAY}\n")
        assert Board(NOW - 5 * DAY).run(server, state) == 3
        # The time was not noted: had the coordinator's clock been the wrong one, this device would
        # refuse all work of the right time.
        assert (state / "newest-work").read_text() == f"{NOW - 6 * DAY}\n"
    assert of_clocks(said) == []


def test_a_time_noted_while_the_clocks_were_wrong_locks_nobody_out(tmp_path: Path) -> None:
    with running(configured(tmp_path / "c", ONE)) as server:
        state = joined(tmp_path, server)
        wrong = NOW + 3650 * DAY

        def train(*given: Any, **more: Any) -> object:
            if server.coordinator.status().round == 2:
                server.coordinator.wall_clock = lambda: NOW
                board.now = NOW
            return train_vector(*given, **more)

        server.coordinator.wall_clock = lambda: wrong
        board = Board(wrong, synchronised=True, train=train)
        assert board.run(server, state) == 3
        assert (state / "newest-work").read_text() == f"{NOW}\n"


def test_work_that_is_not_signed_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    with running(configured(tmp_path / "c", ONE)) as server:
        state, board = joined(tmp_path, server), Board(NOW, synchronised=True)
        forged = SimpleNamespace(signed=lambda work, now: work, public="", fingerprint="")
        key, server.coordinator.key = server.coordinator.key, forged  # type: ignore[assignment]

        def mend(board: Board) -> None:
            if board.slept_s > 30:
                server.coordinator.key = key

        board.after = mend
        assert board.run(server, state) == 3
    lines = [line for line in said if "signed" in line or "trusted" in line]
    assert len(lines) == 2
    assert "somebody in between has altered it" in lines[0]


def test_a_join_waits_for_the_clock(tmp_path: Path, said: list[str]) -> None:
    with running(configured(tmp_path / "c", ONE)) as server:
        server.coordinator.wall_clock = lambda: NOW
        bearer = full_token(server.config, "board")
        # From 1970 on it waits however long it takes.
        board = Board(60.0, after=set_after(1000, NOW))
        join(server.url, bearer, "one", tmp_path / "one", sleep=board.sleep, clock=board.clock)
        assert of_clocks(said) == [
            f"Coordinator at {server.url} refuses this device's clock, 1970-01-01 00:01 UTC; "
            "trying again",
        ]
        assert any(line.startswith(f"Coordinator at {server.url} answers again") for line in said)
        # With a clock that may be right it waits for its patience, and with a set one not at all.
        for synchronised, slept in ((False, 31), (True, 0)):
            board = Board(NOW - 5 * DAY, synchronised)
            with refused("join.skewed-clock"):
                join(
                    *(server.url, bearer, "two", tmp_path / "two"),
                    sleep=board.sleep,
                    clock=board.clock,
                    patience_s=40,
                )
            assert board.slept_s == slept
            assert not (tmp_path / "two").exists()


def test_the_release_is_the_newest_of_the_changelog() -> None:
    newest = re.findall(r"(?m)^## \d+\.\d+\.\d+ - (\S+)$", CHANGELOG.read_text())[0]
    assert datetime.datetime.fromtimestamp(RELEASED_S, datetime.UTC).date().isoformat() == newest
