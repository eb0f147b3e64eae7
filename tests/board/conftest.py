"""A board that the tutorial's lines have set up, for all cases of one run."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from board_federation import (
    AGENT,
    IMAGE,
    TWO,
    Installed,
    Served,
    hold_update,
    native_agent,
    serving,
    set_up,
)
from commands import ROOT
from emulated_board import files_of

TABLE = IMAGE / "cases.md"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.board)


@pytest.fixture(scope="session")
def folder() -> Path:
    """The folder of this run. With BOARD_REUSE the board of the last run is taken again."""
    place = IMAGE / "run"
    if not os.environ.get("BOARD_REUSE"):
        shutil.rmtree(place, ignore_errors=True)
        TABLE.unlink(missing_ok=True)
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture(scope="session")
def fleet(folder: Path) -> Iterator[Served]:
    """A federation of one board and one native agent, whose rounds wait for both."""
    with serving(folder / "fleet", TWO) as served, native_agent(served, "native"):
        yield served


@pytest.fixture(scope="session")
def wheel(folder: Path) -> Path:
    """The wheel that the tutorial builds."""
    out = folder / "dist"
    if not out.exists():
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
        subprocess.run([*pip, str(out), str(ROOT)], check=True)
    return next(out.glob("edgetailor-*.whl"))


@pytest.fixture(scope="session")
def installed(folder: Path, fleet: Served, wheel: Path) -> Installed:
    """A board on which each line of the tutorial has run; see `Installed`."""
    made, said = Installed(folder, {}), folder / "said.json"
    if not said.exists():
        said.write_text(json.dumps(set_up(made, fleet, wheel)))
    made.said |= json.loads(said.read_text())
    return made


@pytest.fixture(scope="session")
def reference(installed: Installed, fleet: Served) -> Path:
    """Every checkpoint of the round without a cut, its recording and its update, in a folder."""
    folder = installed.folder / "reference"
    if (folder / "update").exists():
        return folder
    disk = installed.folder / "reference.raw"
    shutil.copyfile(installed.state, disk)
    board = installed.board("uncut", disk)
    board.ok("mkdir -p /tmp/kept")
    agent = board.follow(f"KEPT=/tmp/kept {AGENT}")
    hold_update(agent, fleet)
    board.get("/tmp/kept", folder)
    board.root("sync")
    board.cut()
    agent.end()
    fleet.gate.state = "open"
    shutil.copytree(files_of(disk, installed.folder / "found") / "update", folder / "update")
    return folder


@pytest.fixture
def seen() -> Iterator[Callable[[str, str], None]]:
    """Notes what was seen in a case, for the table of all cases."""
    begun = time.monotonic()

    def note(case: str, what: str) -> None:
        row = f"| {case} | {what} | {time.monotonic() - begun:.0f} s |"
        with TABLE.open("a") as table:
            table.write(row + "\n")
        print(row)

    return note
