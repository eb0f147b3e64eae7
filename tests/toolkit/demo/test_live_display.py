"""What the demo shows while it runs."""

import io
import logging
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from device_agent.formats.protocol.fleet import DeviceStatus, RoundResult, Status
from toolkit.demo.live_display import FleetTable, Lines, stage

HISTORY = (
    RoundResult(round=0, accuracy=0.1, loss=2.3, updates=0),
    RoundResult(round=1, accuracy=0.8, loss=0.5, updates=2),
)


def status(round_: int, *history: RoundResult, ready: int = 4) -> Status:
    training = DeviceStatus(
        device="board-a", name="board-1", submodel="slice:units.2", state="training", loss=0.25,
        rounds_trained=1, bytes_down=1, bytes_up=1, idle_s=0,
    )  # fmt: skip
    return Status(
        state="training", round=round_, rounds=2, expected_devices=2, devices=[training],
        history=list(history), kinds=4, kinds_ready=ready,
    )  # fmt: skip


class Kept(logging.Handler):
    """Keeps the texts of log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the live display logs."""
    logger, kept = logging.getLogger("toolkit.demo.live_display"), Kept()
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield kept.texts
    logger.removeHandler(kept)


def test_without_a_terminal_each_round_is_one_line(said: list[str]) -> None:
    lines = Lines()
    for seen in (
        status(0, ready=0),
        status(0, HISTORY[0], ready=2),
        status(0, HISTORY[0], ready=2),
        status(0, HISTORY[0], ready=4),
        status(1, HISTORY[0]),
        status(2, *HISTORY),
    ):
        lines.show(seen)
    assert said == [
        "Before training: accuracy 10.0%, loss 2.3000",
        "Making graphs of training steps, 2 of 4 kinds",
        "Making graphs of training steps, 4 of 4 kinds",
        "Round 1 of 2: accuracy 80.0%, loss 0.5000",
    ]


def test_all_graphs_are_told_of_though_the_first_round_begins_with_the_last(
    said: list[str],
) -> None:
    lines = Lines()
    for seen in (status(0, ready=1), status(1), status(1, ready=2), status(2, ready=0)):
        lines.show(seen)
    assert said == [
        "Making graphs of training steps, 1 of 4 kinds",
        "Making graphs of training steps, 4 of 4 kinds",
    ]


def test_the_picture_has_a_line_for_each_device() -> None:
    picture = FleetTable(["board-1", "board-2"], time.monotonic())
    picture.show(status(2, *HISTORY))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(picture)
    head, _, *rows = console.export_text().splitlines()
    assert head.rstrip() == "Round 2 of 2, training · 0 s · global accuracy 80.0%"
    assert [row.split() for row in rows] == [
        ["device", "submodel", "state", "loss"],
        ["board-1", "slice:units.2", "training", "0.2500"],
        ["board-2", "starting"],
    ]


def test_the_picture_says_how_far_the_graphs_are() -> None:
    assert stage(status(0, ready=2)) == (
        "Making graphs of training steps, 2 of 4 kinds, 1 of 2 devices"
    )
