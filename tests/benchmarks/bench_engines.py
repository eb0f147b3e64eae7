"""What a round costs in Flower's simulation engine, and in Ray alone, without any training.

A client gets a model of 33,338 numbers and returns it. In Flower's engine every client is a
message; with Ray alone each of two workers gets its share of the round's clients and returns one
sum. Run `make bench-engines`, which needs no other part of the project.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

NUMBERS, ROUNDS, CPUS = 33_338, 6, 2
SCALES = ((100, 20), (1_000, 20), (10_000, 20), (10_000, 200))
"""Clients, and how many of them are selected."""


def memory() -> int:
    """MB of this process and of Ray's, pages that they share counted once."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if "ray" in (folder / "cmdline").read_text() or folder.name == str(os.getpid()):
                lines = (folder / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except OSError:
            continue  # it has ended
    return total * 1024 // 10**6


def report(engine: str, clients: int, selected: int, rounds: list[float]) -> None:
    """Print a row; the first round starts the workers."""
    first, later = rounds[0], statistics.median(rounds[1:])
    columns = (engine, f"{clients:,}", selected, f"{first:.1f} s", f"{1000 * later:.0f} ms")
    print(f"| {' | '.join(map(str, columns))} | {memory()} MB |", flush=True)


def with_ray(clients: int, selected: int) -> None:
    """Two workers, each with half of the clients of a round."""
    import ray

    begin = time.monotonic()
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level="error")

    @ray.remote
    class Worker:
        def chunk(self, model: np.ndarray, chosen: np.ndarray) -> np.ndarray:
            total = np.zeros(len(model))
            for _ in chosen:
                total += model
            return total

    workers, model, rounds = [Worker.remote() for _ in range(CPUS)], np.zeros(NUMBERS), []
    for number in range(ROUNDS):
        chosen = np.random.default_rng(number).choice(clients, selected, replace=False)
        sent = ray.put(model)
        chunks = np.array_split(chosen, CPUS)
        sums = [w.chunk.remote(sent, chunk) for w, chunk in zip(workers, chunks, strict=True)]
        model = sum(ray.get(sums)) / selected
        rounds.append(time.monotonic() - begin)
        begin = time.monotonic()
    report("Ray", clients, selected, rounds)
    ray.shutdown()


def with_flower(clients: int, selected: int) -> None:
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
                Message(record(model), dst_node_id=nodes[one], message_type=MessageType.TRAIN)
                for one in chosen
            ]
            replies = grid.send_and_receive(messages)
            model = np.mean([one.content["model"]["w"].numpy() for one in replies], axis=0)
            rounds.append(time.monotonic() - begin)
        report("Flower", clients, selected, rounds)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0}}
    given = {**resources, "init_args": {"num_cpus": CPUS, "include_dashboard": False}}
    run_simulation(server, client, num_supernodes=clients, backend_config=given)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("engine", choices=("ray", "flower"))
    options.add_argument("scale", type=int, choices=range(len(SCALES)), help="which of SCALES")
    chosen = options.parse_args()
    (with_ray if chosen.engine == "ray" else with_flower)(*SCALES[chosen.scale])


if __name__ == "__main__":
    main()
