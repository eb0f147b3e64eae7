"""A round of `simulate` by engine: one process, two local workers, two workers in Ray.

Clients have four samples of 8 x 8 and train `digits_cnn`, in as many steps as the row says. `times`
prints the time of a round: the engines take turns in one process, medians. Beside it is the
processor time on the longest path, that of the process itself and of its busiest worker, which
hardly depends on what else the machine does. `memory` prints the memory of all processes of one
engine. `flower` is a round in Flower's simulation engine with a client that only returns the model,
and needs no other part of the project.

    python tests/benchmarks/bench_engines.py times | memory | flower
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
ENGINES = {"one process": ("local", 1), "2 local": ("local", 2), "2 in Ray": ("ray", 2)}
SAMPLES, HELD_OUT, ROUNDS, CPUS = 4, 1000, 5, 2


class Fleet(NamedTuple):
    """So many clients, of which `selected` train `steps` batches in a round."""

    clients: int
    selected: int
    steps: int = 1


TIMES = (
    *(Fleet(100, 20), Fleet(1_000, 20), Fleet(10_000, 20), Fleet(40_000, 200)),
    *(Fleet(100, 20, 8), Fleet(100, 20, 32)),
)
MEMORY = Fleet(100, 20), Fleet(10_000, 20), Fleet(40_000, 200)
NUMBERS = 33_338
"""Of the model that Flower's clients return; as many as `digits_cnn` has."""


def written(fleet: Fleet, folder: Path) -> Path:
    count, draw = fleet.clients * SAMPLES + HELD_OUT, np.random.default_rng(0)
    x = draw.random((count, 1, 8, 8), np.float32)
    np.savez(folder / "data.npz", x=x, y=draw.integers(10, size=count))
    (folder / "fleet.toml").write_text(
        f"""
        model = "toolkit.models:digits_cnn"
        input_shape = [1, 8, 8]
        rounds = 99
        [training]
        steps = {fleet.steps}
        batch_size = {SAMPLES}
        [simulation]
        data = "data.npz"
        participation = {fleet.selected / fleet.clients}
        held_out_share = {(HELD_OUT - 0.5) / count}
        [[devices]]
        name = "all"
        submodel = "full"
        count = {fleet.clients}
        """
    )
    return folder / "fleet.toml"


class Running:
    """A simulation whose engine stays between rounds."""

    def __init__(self, name: str, file: Path, stack: ExitStack) -> None:
        import torch

        from toolkit.simulation.results import RunFolder
        from toolkit.simulation.simulate import prepare, started
        from toolkit.simulation.simulation_config import load_simulation

        torch.set_num_threads(1)
        folder = RunFolder(file.parent / name)
        self.simulation = prepare(load_simulation(file), folder)
        folder.begin({}, force=True)
        engine, workers = ENGINES[name]
        self.engine = stack.enter_context(closing(started(engine, self.simulation, workers, 1)))
        self.seconds: list[float] = []
        self.longest: list[float] = []

    def round(self, number: int) -> None:
        own, before, begin = time.process_time(), used(), time.monotonic()
        self.simulation.run_round(number, self.engine)
        self.seconds.append(time.monotonic() - begin)
        others = [now - before.get(process, 0.0) for process, now in used().items()]
        self.longest.append(time.process_time() - own + max(others, default=0.0))


def descendants(process: int) -> Iterator[int]:
    """The processes that `process` has started, and those that they have."""
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for child in map(int, tasks.read_text().split()):
                yield child
                yield from descendants(child)


def used() -> dict[int, float]:
    """Processor seconds so far of every process that this one has started."""
    seconds: dict[int, float] = {}
    for process in descendants(os.getpid()):
        with suppress(OSError):
            tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
            seconds[process] = sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
    return seconds


def memory() -> int:
    """MB of this process and those that it has started, pages that they share counted once."""
    total = 0
    for process in (os.getpid(), *descendants(os.getpid())):
        with suppress(OSError):
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024 // 10**6


def print_times() -> None:
    names = [f"{name}{what}" for what in ("", ", path") for name in ENGINES]
    print(f"| clients | selected | steps | {' | '.join(names)} |")
    print("|" + "---|" * (3 + len(names)))
    for fleet in TIMES:
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
            file = written(fleet, Path(scratch))
            running = [Running(name, file, stack) for name in ENGINES]
            for number in range(1, ROUNDS + 2):
                for simulation in running:
                    simulation.round(number)
            values = [statistics.median(simulation.seconds[1:]) for simulation in running]
            values += [statistics.median(simulation.longest[1:]) for simulation in running]
            row = [f"{value * 1000:.0f} ms" for value in values]
            shown = f"{fleet.clients:,} | {fleet.selected} | {fleet.steps}"
            print(f"| {shown} | {' | '.join(row)} |", flush=True)


def print_memory(name: str, fleet: Fleet) -> None:
    """The first round starts the workers."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        running = Running(name, written(fleet, Path(scratch)), stack)
        most = 0
        for number in range(1, 4):
            running.round(number)
            most = max(most, memory())
        row = f"{fleet.clients:,} | {fleet.selected} | {running.seconds[0]:.1f} s | {most} MB"
        print(f"| {name} | {row} |", flush=True)


def print_all_memory() -> None:
    print(
        "| engine | clients | selected | first round | memory |\n|---|---|---|---|---|", flush=True
    )
    for name in ENGINES:
        for fleet in range(len(MEMORY)):
            subprocess.run([sys.executable, __file__, "memory", name, str(fleet)], check=True)


def print_flower(clients: int, selected: int) -> None:
    """Flower's simulation engine, which runs on Ray."""
    from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    def record(model: np.ndarray) -> Any:
        return RecordDict({"model": ArrayRecord({"w": Array(model)})})

    @client.train()
    def train(message: Any, context: Any) -> Any:
        return Message(record(message.content["model"]["w"].numpy()), reply_to=message)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        model, rounds = np.zeros(NUMBERS, np.float32), []
        for number in range(ROUNDS):
            begin = time.monotonic()
            while len(nodes := sorted(grid.get_node_ids())) < clients:
                time.sleep(0.05)  # they register one after the other
            chosen = np.random.default_rng(number).choice(clients, selected, replace=False)
            messages = [
                Message(record(model), dst_node_id=nodes[client], message_type=MessageType.TRAIN)
                for client in chosen
            ]
            replies = grid.send_and_receive(messages)
            model = np.mean([reply.content["model"]["w"].numpy() for reply in replies], axis=0)
            rounds.append(time.monotonic() - begin)
        first, later = rounds[0], statistics.median(rounds[1:])
        row = f"{clients:,} | {selected} | {first:.1f} s | {1000 * later:.0f} ms"
        print(f"| Flower | {row} | {memory()} MB |", flush=True)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0}}
    given = {**resources, "init_args": {"num_cpus": CPUS, "include_dashboard": False}}
    run_simulation(server, client, num_supernodes=clients, backend_config=given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("times", "memory", "flower"))
    parser.add_argument("engine", nargs="?", choices=ENGINES)
    parser.add_argument("fleet", nargs="?", type=int, help="number of the row, from 0")
    options = parser.parse_args()
    if options.what == "times":
        print_times()
    elif options.what == "flower":
        print_flower(1_000, 20)
    elif options.engine is None:
        print_all_memory()
    else:
        print_memory(options.engine, MEMORY[options.fleet])


if __name__ == "__main__":
    main()
