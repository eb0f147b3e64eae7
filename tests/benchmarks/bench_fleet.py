"""A fleet whose devices come and go, with synchronous, selecting and asynchronous rounds.

300 devices train the digits on a real `edgetailor serve` over loopback, in time that runs SPEED
times as fast. Of the devices, 30% are away at a time, each at its own time of the day; 20% of the
trainings drop out; the coordinator is killed twice and started again. Each kind of rounds also runs
without these faults. Prints a table, and draws the accuracy over the fleet's time.
Run `make bench-fleet`.
"""

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from safetensors.numpy import load

from commands import free_port
from diurnal_fleet import Coordinator, DiurnalFleet, Habits, Round, running
from profiles.text_formatting import format_duration
from toolkit.coordinator.startup import serve
from toolkit.simulation.curves import COLOURS, in_percent
from toolkit.simulation.digits import digits
from waiting_fleet import enrolled, update_of

DEVICES, HELD_OUT, SAMPLES = 300, 360, 40
"""Devices, digits that judge the model, and digits that a device draws from the others."""
SPEED, DEADLINE_S, DAY_S = 6.0, 150.0, 2000.0
AWAY, DROPPING, TRAINING_S = 0.3, 0.2, (20.0, 60.0)
BATCH, EPOCHS, RATE = 20, 5, 0.3
TARGET, LAST = 0.95, 5
MOST_DEADLINES, MOST_POINTS = 1 / 20, 1.0
"""The goals: the share of rounds that wait for their deadline, and what faults cost."""
NETS = """
from torch import nn

def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
"""
CONFIG = """
model = "nets:small"
input_shape = [1, 8, 8]
held_out = "held_out.npz"
port = {port}
rounds = {rounds}
deadline_s = {deadline}
{keys}

[[devices]]
name = "device"
submodel = "full"
count = {devices}
"""


@dataclass(frozen=True)
class Mode:
    """A kind of rounds.

    Attributes:
        keys: Its lines in the federation's file.
        rounds: How many are run.
        compared: Whether the fleet also lives without faults.
    """

    keys: str
    rounds: int
    compared: bool = True


MODES = {
    "all devices": Mode("", 14, compared=False),
    "over-selected": Mode("clients_per_round = 30\nover_selection = 1.8", 24),
    "asynchronous": Mode('mode = "async"\nbuffer_size = 100', 30),
}


@dataclass(frozen=True)
class Life:
    """How a fleet lived with one kind of rounds.

    Attributes:
        mode: The kind, as in MODES.
        faults: Whether devices and the coordinator had faults.
        began: When the devices began, in seconds since 1970.
        rounds: The rounds, from 0 on.
        counts: What happened to updates and connections.
    """

    mode: str
    faults: bool
    began: float
    rounds: list[Round]
    counts: Counter[str]

    @property
    def ends(self) -> list[float]:
        """When each round ended, in seconds of the fleet since the devices began."""
        return [max(one.ended - self.began, 0) * SPEED for one in self.rounds]

    @property
    def spans(self) -> list[float]:
        """How long each round took, from the end of the round before: opening and waiting too."""
        return [end - start for start, end in pairwise(self.ends)]

    @property
    def waited(self) -> int:
        """How many rounds took at least as long as their deadline."""
        return sum(span >= DEADLINE_S for span in self.spans)

    @property
    def last(self) -> float:
        """The mean accuracy of the last rounds."""
        return statistics.fmean(one.accuracy for one in self.rounds[-LAST:])

    @property
    def reached(self) -> int | None:
        """The first round with the accuracy TARGET."""
        return next((n for n, one in enumerate(self.rounds) if one.accuracy >= TARGET), None)

    @property
    def label(self) -> str:
        """The name of this life."""
        return self.mode if self.faults else f"{self.mode}, no faults"


class Trainer:
    """Trains the network of NETS in numpy: plain SGD on the digits of each device."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        x, y = digits()
        order = self.draw.permutation(len(x))
        self.x, self.y = x[order].reshape(len(x), -1), y[order]
        self.rows = [
            HELD_OUT + self.draw.choice(len(x) - HELD_OUT, SAMPLES, replace=False)
            for _ in range(DEVICES)
        ]

    def update(self, device: int, weights: bytes, manifest: bytes) -> tuple[bytes, bytes]:
        """The two files of the update of a device."""
        known = load(weights)
        names = ("1.weight", "1.bias", "3.weight", "3.bias")
        trained = [known[name].copy() for name in names]
        for _ in range(EPOCHS):
            for rows in self.draw.permutation(self.rows[device]).reshape(-1, BATCH):
                step(trained, self.x[rows], self.y[rows])
        return update_of(dict(zip(names, trained, strict=True)), manifest, SAMPLES)


def step(weights: Sequence[np.ndarray], x: np.ndarray, y: np.ndarray) -> None:
    """Change `weights` by a step of SGD with the mean cross-entropy."""
    first, first_bias, last, last_bias = weights
    hidden = np.maximum(x @ first.T + first_bias, 0)
    scores = hidden @ last.T + last_bias
    grad = np.exp(scores - scores.max(1, keepdims=True))
    grad /= grad.sum(1, keepdims=True)
    grad[np.arange(len(y)), y] -= 1
    grad /= len(y)
    back = (grad @ last) * (hidden > 0)
    for weight, change in (
        (last, grad.T @ hidden), (last_bias, grad.sum(0)),
        (first, back.T @ x), (first_bias, back.sum(0)),
    ):  # fmt: skip
        weight -= np.float32(RATE) * change


def written(folder: Path, mode: Mode, trainer: Trainer, port: int) -> Path:
    """The federation's file in a new folder, with all that it needs."""
    folder.mkdir()
    (folder / "nets.py").write_text(NETS)
    x = trainer.x[:HELD_OUT].reshape(-1, 1, 8, 8)
    np.savez(folder / "held_out.npz", x=x, y=trainer.y[:HELD_OUT])
    file = folder / "fleet.toml"
    deadline = DEADLINE_S / SPEED
    file.write_text(
        CONFIG.format(
            keys=mode.keys, rounds=mode.rounds, port=port, deadline=deadline, devices=DEVICES
        )
    )
    return file


async def ended(coordinator: Coordinator, round_: int) -> None:
    """Wait until `round_` has ended."""
    while coordinator.ended < round_:
        await asyncio.sleep(0.1)


async def lived(folder: Path, name: str, faults: bool, seed: int) -> Life:
    """Let a fleet live with one kind of rounds, with or without faults."""
    mode, trainer, port = MODES[name], Trainer(seed), free_port()
    file = written(folder, mode, trainer, port)
    habits = Habits(
        speed=SPEED,
        training_s=TRAINING_S,
        away=AWAY if faults else 0,
        day_s=DAY_S,
        dropping=DROPPING if faults else 0,
        silent_s=(DEADLINE_S, 3 * DEADLINE_S),
        seed=seed,
    )
    secrets = enrolled(folder / "state", DEVICES)
    fleet = DiurnalFleet(f"http://127.0.0.1:{port}", secrets, habits, trainer.update)
    with running(file, serve, SPEED) as coordinator:
        await ended(coordinator, 0)
        began, fleet.begun = time.time(), time.monotonic()
        life = asyncio.create_task(fleet.run())
        for round_ in (mode.rounds // 3, 2 * mode.rounds // 3) if faults else ():
            await ended(coordinator, round_)
            await asyncio.sleep(TRAINING_S[0] / SPEED)  # the next round is open
            await asyncio.to_thread(coordinator.kill)
            coordinator.start()
        await ended(coordinator, mode.rounds)
        fleet.is_over = True
        life.cancel()
        await asyncio.wait([life])
        return Life(name, faults, began, coordinator.rounds(), fleet.counts)


def row(life: Life, clean: Life | None) -> str:
    """The line of a life in the table, beside the life without faults."""
    rounds, reached = len(life.rounds) - 1, life.reached
    cost = "" if clean is None else f"{100 * (clean.last - life.last):.1f}"
    cells = [
        life.label,
        f"{rounds}",
        f"{statistics.median(life.spans):.0f} s",
        f"{life.waited}",
        "never" if reached is None else f"{reached}",
        "" if reached is None else format_duration(life.ends[reached]),
        f"{100 * life.last:.1f}%",
        cost,
        *(f"{life.counts[name]:,}" for name in ("sent", "refused", "dropped")),
    ]
    return f"| {' | '.join(cells)} |"


def draw(lives: Sequence[Life], to: Path) -> None:
    """Write a PNG with the accuracy of each life over the time of the fleet."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for life in lives:
        axes.plot(
            [end / 60 for end in life.ends],
            [one.accuracy for one in life.rounds],
            color=COLOURS[list(MODES).index(life.mode)],
            linestyle="-" if life.faults else ":",
            label=life.label,
        )
    axes.axhline(TARGET, color="#000000", linestyle="--", linewidth=0.8)
    axes.set(xlabel="minutes of the fleet", title="Accuracy on held-out digits", ylim=(0.5, 1))
    in_percent(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(to)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, action="append", help="only this kind of rounds")
    parser.add_argument("--curves", type=Path, default=Path("fleet.png"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print("| rounds of | rounds | one takes | at the deadline | rounds to 95% | time to 95% | "
          "last 5 | faults cost, points | sent | refused | dropped |")  # fmt: skip
    print("|---" * 11 + "|", flush=True)
    lives = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.mode or MODES:
            clean = None
            for faults in (False, True) if MODES[name].compared else (True,):
                folder = Path(scratch, f"{name} {faults}")
                lives.append(asyncio.run(lived(folder, name, faults, given.seed)))
                print(row(lives[-1], clean), flush=True)
                print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
                clean = lives[-1]
    draw(lives, given.curves)
    for life in (life for life in lives if life.faults):
        waited, most = life.waited, MOST_DEADLINES * (len(life.rounds) - 1)
        print(f"{life.mode}: {waited} rounds waited for their deadline (goal at most {most:.0f})")


if __name__ == "__main__":
    main()
