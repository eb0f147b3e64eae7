"""A board loses its power in each part of a round, and its state stays whole."""

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from board_federation import (
    AGENT,
    BATCHES,
    EPOCHS,
    SLOW_PIECE,
    Installed,
    Served,
    check_whole,
    cut_connections,
    tensors_in,
)
from emulated_board import Board, Lines, files_of

CHAINS = 4
PHASES = ("download", "recording", "training", "checkpoint", "upload")
Place = tuple[int, ...]


def place_of(text: str) -> Place:
    """The instruction, epoch and batch in a name of a checkpoint."""
    return tuple(map(int, text.split("-")))


def checkpoint_in(folder: Path) -> tuple[Place, Path] | None:
    """The checkpoint of the training in a state folder, and its place."""
    file = folder / ".update.training" / "checkpoint.safetensors"
    if not file.exists():
        return None
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        position = json.loads(json.loads(opened.read(size))["__metadata__"]["position"])
    return tuple(position.get(key, 0) for key in ("instruction", "epoch", "batch")), file


def wait_for_moment(phase: str, agent: Lines, fleet: Served, draw: random.Random) -> None:
    """Return at a random moment of the phase."""
    if phase == "download":
        fleet.gate.piece = SLOW_PIECE
        agent.until("Fetching", draw.randint(1, 2))
        time.sleep(draw.uniform(0, 2))
    elif phase == "recording":
        agent.until("recording .*: batch", draw.randint(1, BATCHES - 1))
    elif phase == "training":
        agent.until("epoch .*: batch", draw.randint(1, BATCHES - 2))
        time.sleep(draw.uniform(0, 0.3))
    elif phase == "checkpoint":
        agent.until("Continuing the interrupted training")
        agent.until("Writing checkpoint", draw.randint(1, BATCHES - 2))
        time.sleep(draw.uniform(0, 2))
    else:
        fleet.gate.piece = SLOW_PIECE
        agent.until("Sending the update")
        time.sleep(draw.uniform(0, 1))
        fleet.gate.state = "still"  # if the whole update arrived, the round would end


def test_a_training_without_cuts_takes_every_batch(reference: Path) -> None:
    places = {place_of(file.stem) for file in reference.glob("*-*-*.safetensors")}
    trained = {(place[1], place[2]) for place in places if place[0] == max(places)[0] - 1}
    assert {(epoch, batch) for epoch in range(EPOCHS) for batch in range(1, BATCHES)} <= trained


@pytest.mark.parametrize("chain", range(CHAINS))
def test_after_each_cut_the_training_goes_on_bit_for_bit(
    chain: int,
    installed: Installed,
    fleet: Served,
    reference: Path,
    seed: int,
    seen: Callable[[str, str], None],
) -> None:
    draw = random.Random(seed + chain)
    disk = installed.folder / "cut.raw"
    shutil.copyfile(installed.state, disk)
    places: list[str] = []
    reached: Place = ()
    begun = False
    for phase in PHASES:
        board = installed.board("cut", disk)
        settings = "SLOW=0.4 " if phase == "checkpoint" else ""
        # After a restart the device may measure another form as the faster one.
        settings += "FORM=plain " if begun else ""
        agent = board.follow(settings + AGENT)
        wait_for_moment(phase, agent, fleet, draw)
        board.cut()
        agent.end()
        cut_connections(fleet)
        written = [line.split()[1] for line in agent.lines if line.endswith("is written")]
        reached = max([reached, *map(place_of, written)])
        found = files_of(disk, installed.folder / "found")
        check_whole(found)
        if phase == "upload":
            update = tensors_in(found / "update" / "update.safetensors")
            assert update == tensors_in(reference / "update" / "update.safetensors")
            places.append("update equal")
        elif (checkpoint := checkpoint_in(found)) is not None:
            begun = True
            place, file = checkpoint
            assert place >= reached, "a checkpoint that was written is lost"
            name = "-".join(map(str, place))
            assert tensors_in(file) == tensors_in(reference / f"{name}.safetensors")
            compare_recordings(found / ".update.training", reference, place)
            places.append(f"{phase} at {name}")
        else:
            assert not reached
            places.append(phase)
    if chain == CHAINS - 1:
        finish(installed.board("cut", disk))
    seen(f"five power cuts in one round, {chain + 1} of {CHAINS}", "; ".join(places))


def compare_recordings(folder: Path, reference: Path, place: Place) -> None:
    """Check that recorded activations are those of the run without cuts, up to the checkpoint.

    What was recorded after the checkpoint may be torn: the device records it again.
    """
    for file in folder.glob("*.npy"):
        whole, part = np.load(reference / file.name), np.load(file, mmap_mode="r")
        rows = len(whole) * place[2] // BATCHES if place[0] == 0 else len(whole)
        assert part[:rows].tobytes() == whole[:rows].tobytes()


def finish(board: Board) -> None:
    """Let the agent send its update, and see the next round."""
    agent = board.follow(AGENT)
    agent.until("the update was accepted")
    agent.until("Round .*: training")
    board.cut()
    agent.end()
