"""A board loses its power while it takes a release; it always has a whole model."""

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from board_federation import (
    AGENT,
    BATCHES,
    EPOCHS,
    SLOW_PIECE,
    TWO,
    Installed,
    Served,
    check_whole,
    cut_connections,
    native_agent,
    serving,
)
from commands import command, environment
from device_agent.federation.release_folder import DeviceReleases
from device_agent.formats.atomic_files import fingerprint_file
from emulated_board import Board, files_of, new_state_disk

PLAIN = "edgetailor/bin/edgetailor-agent"
PHASES = ("download", "switch", "report")


def test_after_each_cut_a_board_has_a_whole_model(
    installed: Installed, seed: int, seen: Callable[[str, str], None]
) -> None:
    draw = random.Random(seed)
    folder, disk = installed.folder / "release-fleet", installed.folder / "release.raw"
    shutil.rmtree(folder, ignore_errors=True)
    board = installed.board("release", new_state_disk(disk))
    runs = []
    try:
        with serving(folder, TWO) as fleet:
            wait_for_others(board, fleet)
            release(fleet, "1")
            for phase in PHASES:
                cut_in(phase, board, fleet, draw)
                found = files_of(disk, installed.folder / "found")
                check_whole(found)
                runs.append(check_release(found))
                board = installed.board("release", disk)
                board.ok(f"{PLAIN} predict --data local.npz --json")
            agent, end = board.follow(AGENT), time.monotonic() + 300
            while "taken" not in answers(fleet):
                assert time.monotonic() < end, agent.text
                time.sleep(1)
    finally:
        board.cut()
    assert runs == sorted(runs)
    seen("three power cuts while a release is taken", f"release after each: {runs}")


def wait_for_others(board: Board, fleet: Served) -> None:
    """Let the board take part in two rounds; the second waits for a device that is gone."""
    board.put(fleet.token("pi"), "release.token")
    board.ok(f"{PLAIN} join {fleet.url} --token-file release.token")
    agent = board.follow(AGENT)
    with native_agent(fleet, "native"):
        agent.until(f"epoch {EPOCHS}: batch {BATCHES} ")
        assert "Round 1: the update was accepted" in (fleet.folder / "native.log").read_text()
    agent.until("Round 2: the update was accepted")
    board.ok("pkill -TERM -f closely.py")
    agent.process.wait()


def release(fleet: Served, *arguments: str) -> str:
    """Run `edgetailor release`; what it wrote to stdout."""
    return subprocess.run(
        command("edgetailor", "release", "federation.toml", *arguments),
        cwd=fleet.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def answers(fleet: Served) -> list[str]:
    """What each device has done with its release."""
    return [device["answer"] for device in json.loads(release(fleet, "--json"))["devices"]]


def cut_in(phase: str, board: Board, fleet: Served, draw: random.Random) -> None:
    """Run the agent, and cut the power at a random moment of the phase."""
    fleet.gate.piece = SLOW_PIECE if phase == "download" else None
    agent = board.follow(f"SLOW=0.4 {AGENT}")
    agent.until("Fetching release 1" if phase == "download" else "Writing release.json")
    time.sleep(draw.uniform(0, 3))
    board.cut()
    agent.end()
    cut_connections(fleet)


def check_release(state: Path) -> int:
    """Check that the release to which release.json points has all its files, undamaged."""
    if (state / "release.json").exists():
        json.loads((state / "release.json").read_bytes())
    releases = DeviceReleases(state)
    current = releases.read().current
    if current is None:
        return 0
    manifest = releases.bundle(current.bundle) / "manifest.json"
    assert fingerprint_file(manifest).sha256 == current.bundle
    for name, file in json.loads(manifest.read_bytes())["files"].items():
        assert fingerprint_file(manifest.parent / name).sha256 == file["sha256"]
    return current.number
