"""The tutorial on Raspberry Pis, line by line: on the server, and on a board."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from board_federation import FIXED, TUTORIAL, Installed, Served, tutorial_lines
from commands import command, environment
from emulated_board import STATE_MOUNT

MODEL = """
from torch import nn

def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10),
    )
"""


def test_the_lines_on_a_board_end_with_accepted_updates(
    installed: Installed, seen: Callable[[str, str], None]
) -> None:
    said = installed.said
    assert re.search(f"Joined .* it trains {FIXED}", said[line_with(" join ")])
    assert "FAIL" not in said[line_with("doctor")]
    assert "round" in said[line_with("status")].lower()
    seen("tutorial, steps 4 to 6", f"joined, round 1 accepted; booted in {said['boot']} s")


def test_a_limit_that_the_board_cannot_keep_is_refused_and_memory_is_limited(
    installed: Installed,
) -> None:
    [refused] = [said for line, said in installed.said.items() if "--max-temperature" in line]
    assert "temperature" in refused
    assert "Traceback" not in refused
    assert "MemoryMax=200000000" in installed.said["unit"]


def line_with(word: str) -> str:
    [line] = [line for step in (4, 6) for line in tutorial_lines(step) if word in line]
    return line


def test_the_lines_on_the_server_run(tmp_path: Path, seen: Callable[[str, str], None]) -> None:
    (tmp_path / "mymodels.py").write_text(MODEL)
    x = np.random.default_rng(0).random((40, 3, 32, 32), np.float32)
    np.savez(tmp_path / "held_out.npz", x=x, y=np.arange(40) % 10)
    [plan] = tutorial_lines(2)
    done = run_line(plan, tmp_path)
    assert done.returncode == 0, done.stderr
    page = TUTORIAL.read_text()
    toml = re.search(r"^```toml\n(.*?)^```", page, re.M | re.S)
    assert toml is not None
    (tmp_path / "federation.toml").write_text("port = 0\n" + toml[1])
    [serve] = tutorial_lines(3)
    name, *arguments = serve.split()
    with (tmp_path / "log").open("w") as log:
        served = subprocess.Popen(
            command(name, *arguments), cwd=tmp_path, env=environment(), stderr=log, stdout=log
        )
        try:
            wait_for(tmp_path / "state" / "tokens" / "pi.token", served)
        finally:
            served.terminate()
            served.wait()
    seen("tutorial, steps 2 and 3", "planned, served, a token written")


def run_line(line: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    name, *arguments = line.split()
    return subprocess.run(
        command(name, *arguments), cwd=folder, env=environment(), capture_output=True, text=True
    )


def wait_for(path: Path, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        if path.exists():
            return
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"{path} was not written")


def test_a_board_that_boots_without_a_network_takes_up_the_round_that_a_cut_ended(
    installed: Installed, fleet: Served, seen: Callable[[str, str], None]
) -> None:
    board = installed.board("plug")
    journal = f"{tutorial_lines(5)[1]} -o cat"
    try:
        board.ok("systemctl --user start edgetailor-agent")
        log = board.follow(f"{journal} -n 0")
        number = re.findall(r"Round (\d+): training", log.until("Round .*: training"))[0]
        board.cut()
        log.end()
        fleet.gate.state = "refuse"
        begun = time.monotonic()
        board.start(board.folder / "disk.qcow2")
        boot = time.monotonic() - begun
        log = board.follow(f"{journal} -n all -b")
        log.until("trying again")
        fleet.gate.state = "open"
        log.until(f"Round {number}: the update was accepted")
        log.end()
        seen(
            "tutorial, step 7: power cut, boot, network away",
            f"the service started by itself, waited, and round {number} was accepted; booted in "
            f"{boot:.0f} s",
        )
    finally:
        board.cut()
        fleet.gate.state = "open"


def test_the_agent_becomes_a_service_of_the_system(
    installed: Installed, fleet: Served, seen: Callable[[str, str], None]
) -> None:
    disk = installed.folder / "service.raw"
    shutil.copyfile(installed.state, disk)
    board = installed.board("service")
    agent = "sudo edgetailor/bin/edgetailor-agent"
    state = f"--state {STATE_MOUNT}/edgetailor-agent"
    try:
        board.attach(disk)  # with the same boot id, else the journal would show no new lines
        board.ok(f"{agent} install-service {state} --data local.npz")
        board.root("systemctl is-active edgetailor-agent")
        assert board.ok("systemctl show -P User edgetailor-agent").strip() == "pi"
        log = board.follow("journalctl -u edgetailor-agent -f -o cat", "root")
        log.until("the update was accepted")
        log.end()
        board.ok(f"{agent} uninstall-service")
        assert "could not be found" in board.run("systemctl status edgetailor-agent").text
    finally:
        board.cut()
    seen("install-service for the system", "ran as pi, sent an update, was removed")
