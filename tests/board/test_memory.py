"""A board with too little memory: refusals by prediction, MemoryMax, and half of the memory."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from board_federation import AGENT, FEDERATION, IMAGE, KIND, Installed, Served, hold_update, serving
from commands import command, environment
from emulated_board import Board, files_of, overlay

BATCH = 16
SHAPE = (3, 32, 32)
TRAIN = "edgetailor/bin/edgetailor-agent train big --data big.npz --out out --threads 1"
PEAK = (
    "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:]).returncode; "
    "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, code)"
)
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def packed(installed: Installed) -> Path:
    """A bundle that needs much memory, and its data, in an archive."""
    folder = installed.folder / "large"
    if not (folder / "large.tar").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shape = ",".join(map(str, SHAPE))
        exporting = ["toolkit.models:resnet20", "--input-shape", shape, "--batch", BATCH]
        subprocess.run(
            command("edgetailor", "export", *exporting, "--out", folder / "big"),
            env=environment(),
            check=True,
        )
        x = np.random.default_rng(0).random((BATCH, *SHAPE), np.float32)
        np.savez(folder / "big.npz", x=x, y=np.arange(BATCH) % 10)
        subprocess.run(["tar", "-C", folder, "-cf", folder / "large.tar", "big", "big.npz"])
    return folder / "large.tar"


def megabytes(text: str) -> float:
    found = re.search(r"Allow at least (\d+(?:\.\d+)?)MB", text)
    assert found is not None, text
    return float(found[1])


def test_a_refusal_predicts_what_the_training_takes(
    installed: Installed, packed: Path, seen: Callable[[str, str], None]
) -> None:
    board = installed.board("memory")
    try:
        board.put(packed, "large.tar")
        board.ok("tar -xf large.tar")
        refused = board.run(f"{TRAIN} --max-memory 80MB")
        assert refused.code == 5
        predicted = megabytes(refused.text)
        assert board.run("test -e out").code, "a refused training wrote an update"
        trained = board.ok(f"edgetailor/bin/python -c {shlex.quote(PEAK)} {TRAIN} --seed 1")
        peak, code = re.findall(r"^peak (\d+) (\d+)$", trained, re.M)[0]
        assert code == "0", trained
        measured = int(peak) / 1e6
        assert measured == pytest.approx(predicted, rel=TOLERANCE)
        seen(
            f"refusal by prediction, ResNet-20 with batches of {BATCH}",
            f"predicted {predicted:.0f} MB, taken {measured:.0f} MB",
        )
    finally:
        board.cut()


def test_after_the_kernel_killed_it_the_agent_goes_on(
    installed: Installed, fleet: Served, seen: Callable[[str, str], None]
) -> None:
    disk = installed.folder / "killed.raw"
    shutil.copyfile(installed.state, disk)
    board = installed.board("memory", disk)
    try:
        unit = "systemd-run --unit=tight --uid=1000 --setenv=HOME=/home/pi --wait --pipe"
        started = board.follow(
            f"{unit} -p WorkingDirectory=/home/pi -p MemorySwapMax=0 /home/pi/{AGENT}", "root"
        )
        started.until("epoch 1: batch", 3)
        board.run("systemctl set-property --runtime tight.service MemoryMax=20M", user="root")
        started.until("oom-kill|Finished with result")
        assert "oom-kill" in started.text
        again = board.follow(AGENT)
        again.until("its process was killed; the system's log says whether memory ran out")
        again.until("Continuing the interrupted training")
        hold_update(again, fleet)
        seen("OOM killer by MemoryMax", "killed in epoch 1; the next start said so and continued")
    finally:
        board.cut()
        fleet.gate.state = "open"
    assert (files_of(disk, installed.folder / "found") / "device.json").exists()


@pytest.fixture(scope="module")
def small_fleet(installed: Installed) -> Iterator[Served]:
    """A federation whose first submodel does not fit a board with 256 MB."""
    large = FEDERATION.replace("digits_cnn", "resnet20").replace("[1, 8, 8]", "[3, 32, 32]")
    large = large.replace("batch_size = 8", f"batch_size = {BATCH}").replace(
        "epochs = 2", "steps = 1"
    )
    kind = KIND.format("pi", "full", 1) + 'fallback = "slice:classifier"\n'
    folder = installed.folder / "small"
    folder.mkdir(exist_ok=True)
    x = np.random.default_rng(1).random((20, *SHAPE), np.float32)
    with serving(folder, large + kind, x, np.arange(20) % 10) as served:
        yield served


def test_a_board_of_256_megabytes_gets_a_smaller_submodel(
    installed: Installed, small_fleet: Served, seen: Callable[[str, str], None]
) -> None:
    board = Board(IMAGE, installed.folder / "small-board", memory=256)
    board.folder.mkdir(exist_ok=True)
    small_fleet.gate.state = "refuse"  # the network is away at boot
    board.start(overlay(board.folder / "disk.qcow2", installed.disk))
    agent = "edgetailor/bin/edgetailor-agent"
    state = "--state small"
    try:
        board.ok("systemctl --user stop edgetailor-agent")
        board.put(small_fleet.token("pi"), "small.token")
        board.put(small_fleet.folder / "held_out.npz", "big.npz")
        join = f"{agent} join {small_fleet.url} --token-file small.token {state}"
        away = board.run(join)
        assert away.code
        assert "cannot be reached" in away.text
        small_fleet.gate.state = "open"
        board.ok(join)
        run = board.follow(f"{agent} run --data big.npz --threads 1 --max-memory 100MB {state}")
        refusal = run.until("does not fit")
        run.until("trains slice:classifier")
        run.until("the update was accepted")
        seen("256 MB, and the network away when it joins", refusal.split(": ", 1)[-1][:120])
    finally:
        board.cut()
