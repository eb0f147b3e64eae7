"""A board whose disk is full, or whose root cannot be written."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from board_federation import AGENT, Installed, Served, hold_update
from emulated_board import STATE_MOUNT, Board


@pytest.fixture
def board(installed: Installed, fleet: Served) -> Iterator[Board]:
    """A board that has joined. Its updates do not arrive, so that the round stays as it is."""
    disk = installed.folder / "disks.raw"
    shutil.copyfile(installed.state, disk)
    started = installed.board("disks", disk)
    try:
        yield started
    finally:
        started.cut()
        fleet.gate.state = "open"


def test_a_full_disk_is_named_and_the_training_goes_on_when_there_is_room(
    board: Board, fleet: Served, seen: Callable[[str, str], None]
) -> None:
    full = Path(STATE_MOUNT) / "filler"
    board.run(f"dd if=/dev/zero of={full} bs=64k status=none; truncate -s -256K {full}; sync")
    refused = board.run(AGENT)
    said = refused.text.strip().splitlines()[-1]
    assert refused.code == 2, refused.text
    assert "space" in said or "disk" in said
    assert "Traceback" not in refused.text
    board.ok(f"rm {full}")
    agent = board.follow(AGENT)
    hold_update(agent, fleet)
    seen("full state disk", f'"{said}"; with room the round went on')


def test_a_root_that_cannot_be_written_needs_a_state_partition_only(
    board: Board, fleet: Served, seen: Callable[[str, str], None]
) -> None:
    board.root(f"echo u > /proc/sysrq-trigger; sleep 3; mount -o remount,rw {STATE_MOUNT}")
    assert "Read-only" in board.run("touch /home/pi/written").text
    agent = board.follow(AGENT)
    hold_update(agent, fleet)
    seen("read-only root with a state partition", "trained to the upload")
