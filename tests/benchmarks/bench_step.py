"""Training steps in ONNX Runtime against PyTorch eager: time, memory, and what slices save.

Every peer runs in a process of its own; they take turns, one step each, so that whatever else the
machine does meets both alike. Run `make bench-step`; options: --case NAME, --threads N, --steps N.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from step_cases import BATCH, CASES, Case

from device_agent.manifest import Port
from exporters.onnx_writer import to_onnx
from exporters.program import ProgramSignature
from toolkit.submodel import Submodel
from toolkit.weights import from_model

WORKER = Path(__file__).with_name("step_worker.py")
FORWARD = "predict"


class Peer:
    """A worker process that waits for requests."""

    def __init__(self, name: str, case: str, graph: Path, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), name, case, str(graph), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.name = str(self.read())

    def read(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, request: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{request}\n")
        self.process.stdin.flush()
        return float(str(self.read()))

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Turn(NamedTuple):
    """Medians of one case: seconds of a step and bytes above the idle process, by peer."""

    seconds: dict[str, float]
    ratio: float
    memory: dict[str, float]


def signature(submodel: Submodel, name: str) -> ProgramSignature:
    return next(s for s in submodel.program.signatures if s.name == name)


def arrays(case: Case, submodel: Submodel, ports: tuple[Port, ...]) -> dict[str, np.ndarray]:
    """What a step is fed: the submodel's weights, zeros for the optimizer, a random batch."""
    values = submodel.cut(from_model(case.model()))
    fed = {}
    for port in ports:
        shape = [BATCH if size is None else size for size in port.shape]
        if port.kind == "samples":
            fed[port.name] = case.batch().numpy()
        elif port.kind == "labels":
            fed[port.name] = np.zeros(shape, np.int64)
        elif port.state in values:
            fed[port.name] = values[port.state].detach().numpy()
        else:
            fed[port.name] = np.full(shape, 0.01 if port.kind == "scalar" else 0, np.float32)
    return fed


def write_graph(case: Case, name: str, folder: Path) -> Path:
    """The signature `name` of `case` as a graph, and beside it what it is fed."""
    submodel = case.submodel()
    chosen = signature(submodel, name)
    graph = folder / f"{name}.onnx"
    graph.write_bytes(to_onnx(chosen))
    np.savez(graph.with_suffix(".npz"), **arrays(case, submodel, chosen.inputs))
    return graph


def compare(name: str, graph: Path, threads: int, steps: int) -> Turn:
    """One case, step by step in turns."""
    peers = {kind: Peer(kind, name, graph, threads) for kind in ("pytorch", "onnx")}
    seconds: dict[str, list[float]] = {kind: [] for kind in peers}
    for _ in range(steps):
        for kind, peer in peers.items():
            seconds[kind].append(peer.ask("time"))
    memory = {kind: peer.ask("memory") for kind, peer in peers.items()}
    for peer in peers.values():
        peer.stop()
    return Turn(
        {kind: statistics.median(s) for kind, s in seconds.items()},
        statistics.median(a / b for a, b in zip(seconds["onnx"], seconds["pytorch"], strict=True)),
        memory,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--case", action="append", choices=CASES)
    options.add_argument("--threads", action="append", type=int)
    options.add_argument("--steps", type=int, default=20)
    chosen = options.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print("| case | threads | PyTorch | ONNX | ratio | memory: PyTorch | ONNX | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    ratios: dict[int, list[float]] = {}
    for name in chosen.case or CASES:
        with tempfile.TemporaryDirectory() as scratch:
            graph = write_graph(CASES[name], "train", Path(scratch))
            for threads in chosen.threads or (1, 2):
                turn = compare(name, graph, threads, chosen.steps)
                ratios.setdefault(threads, []).append(turn.ratio)
                print(row(name, threads, turn), flush=True)
    for threads, found in ratios.items():
        print(f"Median over the models, {threads} threads: {statistics.median(found):.2f}")


def row(name: str, threads: int, turn: Turn) -> str:
    times = " | ".join(f"{1e3 * turn.seconds[kind]:.1f} ms" for kind in ("pytorch", "onnx"))
    sizes = " | ".join(f"{turn.memory[kind] / 1e6:.0f} MB" for kind in ("pytorch", "onnx"))
    less = turn.memory["onnx"] / turn.memory["pytorch"]
    return f"| {name} | {threads} | {times} | {turn.ratio:.2f} | {sizes} | {less:.2f} |"


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
