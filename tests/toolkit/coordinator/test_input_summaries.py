"""A device whose sensor has another unit: its owner and the operator are told, and it trains on."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from device_agent.federation import round_loop
from device_agent.federation.fleet_status import lines
from device_agent.federation.run_options import RunOptions
from device_agent.formats.input_summary import summary_of
from device_agent.formats.update import RECORD, UpdateRecord
from log_messages import logged
from vector_fleet import ROUNDS, configured, enrol, running, train_vector

UNITS = (1.0, 1.0, 10_000.0)
"""The factor of each device's inputs."""


def samples(seed: int, unit: float = 1.0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((100, 2)) * unit
    return drawn.astype(np.float32)


def training_on(x: np.ndarray, asked: list[bool]) -> Callable[..., object]:
    def train(folder: Path, data: str, out: Path, **options: Any) -> object:
        asked.append(options["summarized"])
        trained = train_vector(folder, data, out, **options)
        if options["summarized"]:
            record = msgspec.json.decode((out / RECORD).read_bytes(), type=UpdateRecord)
            summary = summary_of(x)
            assert summary is not None
            changed = msgspec.structs.replace(record, inputs=summary)
            (out / RECORD).write_bytes(msgspec.json.encode(changed))
        return trained

    return train


def fleet(
    folder: Path, seed: int, held_out: np.ndarray
) -> tuple[list[str], list[list[str]], list[str], list[bool]]:
    """What `serve` and each agent log in a whole federation, the status, and what was asked for."""
    config, told, asked = configured(folder), list[str](), list[bool]()
    np.savez(folder / "held_out.npz", x=held_out, y=np.arange(len(held_out)) % 2)
    said: list[list[str]] = [[] for _ in UNITS]
    with running(config, say=told.append) as server, ExitStack() as stack:
        enrol(server, folder)
        threads = [
            threading.Thread(
                target=round_loop.run,
                args=(RunOptions(data=str(folder / "held_out.npz"), state=folder / str(n)),),
                name=f"agent {n}",
                kwargs={
                    "train": training_on(samples(seed + 1 + n, unit), asked),
                    "sleep": lambda seconds: time.sleep(0.02),
                },
            )
            for n, unit in enumerate(UNITS)
        ]
        for n, thread in enumerate(threads):
            stack.enter_context(logged(messages=said[n], thread=thread.name))
            thread.start()
        for thread in threads:
            thread.join(60)
        status = lines(server.coordinator.status())
    return told, said, status, asked


def test_owner_and_operator_are_told(tmp_path: Path, seed: int) -> None:
    told, said, status, asked = fleet(tmp_path, seed, samples(seed))
    assert asked == [True] * len(UNITS) * ROUNDS
    warned = [[line for line in lines_ if "differ much from" in line] for lines_ in said]
    assert [len(lines) for lines in warned] == [0, 0, 1]  # once, not in every round
    assert said[2][-1] == f"The last round is over; {ROUNDS} updates sent since this agent started."
    noted = [line for line in told if "inputs differ much" in line]
    assert len(noted) == 1
    assert noted[0].startswith("board-1 (machine 2): its inputs differ much from `held_out`: ")
    (place,) = (n for n, line in enumerate(status) if "inputs differ much" in line)
    assert status[place - 1].strip().startswith("board-1")


def test_without_a_reference_nothing_is_sent(tmp_path: Path, seed: int) -> None:
    told, said, status, asked = fleet(tmp_path, seed, samples(seed)[:4])
    assert asked == [False] * len(UNITS) * ROUNDS
    assert not any("differ much" in line for line in [*told, *chain(*said), *status])
