"""The agent's wheel is replaced in mid-round, and goes back."""

import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from board_federation import AGENT, Installed, Served, cut_connections, hold_update, tensors_in
from emulated_board import files_of

PIP = "edgetailor/bin/pip install --quiet --no-deps"


def newer(wheel: Path, folder: Path) -> Path:
    """The wheel with the next version number."""
    old = wheel.name.split("-")[1]
    new = re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), old)
    made = folder / wheel.name.replace(old, new)
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith(("/METADATA", "device_agent/__init__.py", "/RECORD")):
                content = content.replace(old.encode(), new.encode())
            target.writestr(name.replace(f"-{old}.dist-info", f"-{new}.dist-info"), content)
    return made


def test_a_round_goes_on_with_another_version_of_the_agent(
    installed: Installed,
    fleet: Served,
    wheel: Path,
    reference: Path,
    tmp_path: Path,
    seen: Callable[[str, str], None],
) -> None:
    disk = installed.folder / "upgrade.raw"
    shutil.copyfile(installed.state, disk)
    board = installed.board("upgrade", disk)
    versions = []
    try:
        for file in (newer(wheel, tmp_path), wheel):
            board.put(file, file.name)
            agent = board.follow(AGENT)
            agent.until("epoch .: batch", 4)
            board.ok("pkill -TERM -f closely.py")
            agent.process.wait()
            board.ok(f"{PIP} {file.name}")
            versions.append(board.ok("edgetailor/bin/edgetailor-agent --version").strip())
        agent = board.follow(AGENT)
        agent.until("Continuing the interrupted training")
        hold_update(agent, fleet)
        board.ok("pkill -KILL -f closely.py")
        board.root("sync")
        assert versions[0] != versions[1]
        found = files_of(disk, installed.folder / "found")
        assert tensors_in(found / "update" / "update.safetensors") == tensors_in(
            reference / "update" / "update.safetensors"
        )
        seen("upgrade in the middle of a round, and back", f"{versions}; update equal bit for bit")
    finally:
        board.cut()
        cut_connections(fleet)
