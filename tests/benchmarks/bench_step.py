"""Training steps in ONNX Runtime and TFLite against PyTorch eager: time and memory.

Every peer runs in a process of its own; they take turns, one step each, so that whatever else the
machine does meets both alike. Run `make bench-step`; options: --case NAME, --threads N, --steps N.
"""

import argparse
import contextlib
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
from exporters.tflite_writer import to_tflite
from profiles.errors import ExportError
from toolkit.submodel import Submodel
from toolkit.weights import from_model

WORKER = Path(__file__).with_name("step_worker.py")
PEERS = ("pytorch", "onnx", "tflite")


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
    """Medians of one case by peer: seconds of a step, the same over PyTorch's, bytes above idle."""

    seconds: dict[str, float]
    ratio: dict[str, float]
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
    with contextlib.suppress(ExportError):  # TFLite has no recurrent layers
        graph.with_suffix(".tflite").write_bytes(to_tflite([chosen]))
    np.savez(graph.with_suffix(".npz"), **arrays(case, submodel, chosen.inputs))
    return graph


def compare(name: str, graph: Path, threads: int, steps: int) -> Turn:
    """One case, step by step in turns."""
    known = PEERS if graph.with_suffix(".tflite").exists() else PEERS[:2]
    peers = {kind: Peer(kind, name, graph, threads) for kind in known}
    seconds: dict[str, list[float]] = {kind: [] for kind in peers}
    for _ in range(steps):
        for kind, peer in peers.items():
            seconds[kind].append(peer.ask("time"))
    memory = {kind: peer.ask("memory") for kind, peer in peers.items()}
    for peer in peers.values():
        peer.stop()
    return Turn(
        {kind: statistics.median(s) for kind, s in seconds.items()},
        {
            kind: statistics.median(a / b for a, b in zip(own, seconds["pytorch"], strict=True))
            for kind, own in seconds.items()
        },
        memory,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--case", action="append", choices=CASES)
    options.add_argument("--threads", action="append", type=int)
    options.add_argument("--steps", type=int, default=20)
    chosen = options.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    sides = "PyTorch | ONNX | ratio | TFLite | ratio"
    print(f"| case | threads | {sides} | memory: {sides} |")
    print(f"|{'---|' * 12}")
    ratios: dict[tuple[str, int], list[float]] = {}
    for name in chosen.case or CASES:
        with tempfile.TemporaryDirectory() as scratch:
            graph = write_graph(CASES[name], "train", Path(scratch))
            for threads in chosen.threads or (1, 2):
                turn = compare(name, graph, threads, chosen.steps)
                for kind, ratio in turn.ratio.items():
                    ratios.setdefault((kind, threads), []).append(ratio)
                print(row(name, threads, turn), flush=True)
    for (kind, threads), found in ratios.items():
        print(f"Median over the models, {kind}, {threads} threads: {statistics.median(found):.2f}")


def row(name: str, threads: int, turn: Turn) -> str:
    cells = [name, str(threads)]
    cells += columns(turn.seconds, turn.ratio, 1e3, "{:.1f} ms")
    less = {kind: size / turn.memory["pytorch"] for kind, size in turn.memory.items()}
    cells += columns(turn.memory, less, 1e-6, "{:.0f} MB")
    return f"| {' | '.join(cells)} |"


def columns(
    values: dict[str, float], ratios: dict[str, float], scale: float, form: str
) -> list[str]:
    """PyTorch's value, then the others' with their ratios; dashes for a peer that is absent."""
    cells = [form.format(scale * values["pytorch"])]
    for kind in PEERS[1:]:
        there = kind in values
        cells += [form.format(scale * values[kind]), f"{ratios[kind]:.2f}"] if there else ["-", "-"]
    return cells


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
