"""The log of the rounds in the state folder: durable, small, readable after a power cut."""

import logging
import os
import threading
from pathlib import Path

import pytest

from commands import run_code
from device_agent.federation import round_log
from device_agent.federation.device_state import DeviceState
from device_agent.federation.fleet_status import own_lines
from device_agent.federation.round_log import NOT_KEPT, append, kept_log, last_lines
from log_messages import logged
from profiles.errors import DataError

ROUNDS = logging.getLogger("device_agent.federation.round_loop")
EPOCHS = logging.getLogger("device_agent.training.schedule_interpreter")


def texts(path: Path) -> list[str]:
    """The lines without their time."""
    return [line.split(" ", 1)[1] for line in last_lines(path, 1000)]


def fail() -> None:
    """Log as an agent does whose data turn out to be broken."""
    ROUNDS.info("Round 1: training")
    ROUNDS.info("Fetching x", extra=NOT_KEPT)
    EPOCHS.info("epoch 1 of 9: loss 1.0")
    EPOCHS.warning("The largest value is 1e9.\nScale it.")
    other = threading.Thread(target=ROUNDS.info, args=("another agent",))
    other.start()
    other.join()
    raise DataError("{path} is broken.", code="data.broken", path="x.npz")


def test_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rounds.log"
    with logged(), pytest.raises(DataError), kept_log(path):
        fail()
    ROUNDS.warning("after it")
    with logged(), pytest.raises(SystemExit), kept_log(path):
        raise SystemExit(0)
    assert texts(path) == [
        "Started.", "Round 1: training", "The largest value is 1e9. Scale it.",
        "Ended: x.npz is broken.", "Started.", "Stopped.",
    ]  # fmt: skip


def test_every_line_is_on_the_disk_before_the_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []

    def fsync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    append(tmp_path / "log", "one")
    append(tmp_path / "log", "two")
    assert synced == [b"one\n", b"one\ntwo\n"]


def test_the_file_stays_small_and_keeps_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_log, "MOST_BYTES", 2000)
    path = tmp_path / "rounds.log"
    with logged(), kept_log(path):
        for number in range(300):
            ROUNDS.info("Round %d: training", number)
            assert path.stat().st_size <= 2000
    kept = texts(path)
    assert len(kept) > 15
    assert kept == [*(f"Round {n}: training" for n in range(301 - len(kept), 300)), "Ended."]


@pytest.mark.parametrize("torn", [b"2026-11-27T10:00:00 Rou", b"2026 whole\n\0\0\0\0", b"\xff\xfe"])
def test_a_torn_end_spoils_no_other_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rounds.log"
    path.write_bytes(b"2026 first\n" + torn)
    append(path, "2026 next")
    kept = last_lines(path, 10)
    assert (kept[0], kept[-1]) == ("2026 first", "2026 next")
    assert all("\0" not in line for line in kept)
    assert last_lines(path, 1) == ["2026 next"]


def test_a_disk_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    with logged(), kept_log(tmp_path / "missing" / "rounds.log"):
        ROUNDS.info("Round 1: training")
    assert last_lines(tmp_path / "missing" / "rounds.log", 5) == []


KILLED = """
import logging, os, sys
from pathlib import Path
from device_agent.federation.round_log import kept_log
logging.getLogger("device_agent").setLevel(logging.INFO)
with kept_log(Path(sys.argv[1])):
    logging.getLogger("device_agent.federation").info("Round 7: training")
    os.kill(os.getpid(), 9)
"""


def test_status_shows_what_a_killed_agent_did(tmp_path: Path) -> None:
    log = DeviceState(tmp_path).log
    assert own_lines(tmp_path) == []
    run_code(KILLED, log)
    head, started, last = own_lines(tmp_path)
    assert head == f"this device ({log}):"
    assert started.endswith(" Started.")
    assert last.endswith(" Round 7: training")
    DeviceState(tmp_path).forget()
    assert not log.exists()
