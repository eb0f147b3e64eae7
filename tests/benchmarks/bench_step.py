"""Training steps of exported graphs against PyTorch eager: time, memory, and what slices save.

Every peer runs in a process of its own; they take turns, one step each, so that whatever else the
machine does meets both alike. Run `make bench-step`; options: --case NAME, --runtime NAME,
--threads N, --steps N.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
RUNTIMES = ("onnx", "litert")


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
    ratios: dict[str, float]
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


def write_graph(case: Case, name: str, runtime: str, folder: Path) -> Path:
    """The signature `name` of `case` as a graph, and beside it what it is fed."""
    submodel = case.submodel()
    chosen = signature(submodel, name)
    graph = folder / f"{name}.{runtime}"
    graph.write_bytes(to_onnx(chosen) if runtime == "onnx" else to_tflite([chosen]))
    np.savez(graph.with_suffix(".npz"), **arrays(case, submodel, chosen.inputs))
    return graph


def take_turns(peers: dict[str, Peer], steps: int) -> dict[str, list[float]]:
    """Seconds of `steps` steps of every peer, one step each in turn."""
    seconds: dict[str, list[float]] = {kind: [] for kind in peers}
    for _ in range(steps):
        for kind, peer in peers.items():
            seconds[kind].append(peer.ask("time"))
    return seconds


def compare(name: str, graphs: dict[str, Path], threads: int, steps: int) -> Turn:
    """One case, step by step in turns."""
    peers = {"pytorch": Peer("pytorch", name, Path(), threads)}
    peers |= {runtime: Peer(runtime, name, graph, threads) for runtime, graph in graphs.items()}
    seconds = take_turns(peers, steps)
    memory = {kind: peer.ask("memory") for kind, peer in peers.items()}
    for peer in peers.values():
        peer.stop()
    return Turn(
        {kind: statistics.median(s) for kind, s in seconds.items()},
        {kind: median_ratio(seconds[kind], seconds["pytorch"]) for kind in graphs},
        memory,
    )


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def slices(threads: int, steps: int) -> None:
    """Backprop time, a training step less a prediction, of ResNet-20's slices beside the whole."""
    names = [name for name in CASES if name.startswith("resnet20")]
    with tempfile.TemporaryDirectory() as scratch:
        peers = {}
        for name in names:
            for part in ("train", "predict"):
                folder = Path(scratch, name.replace(" ", "-"))
                folder.mkdir(exist_ok=True)
                graph = write_graph(CASES[name], part, "onnx", folder)
                peers[f"{name} {part}"] = Peer("onnx", name, graph, threads)
        seconds = take_turns(peers, steps)
        for peer in peers.values():
            peer.stop()
    backprop = {
        name: [
            a - b for a, b in zip(seconds[f"{name} train"], seconds[f"{name} predict"], strict=True)
        ]
        for name in names
    }
    for name in names[1:]:
        share = statistics.median(backprop[name]) / statistics.median(backprop[names[0]])
        print(f"backprop of {name} over {names[0]}, {threads} threads: {share:.2f}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--case", action="append", choices=CASES)
    options.add_argument("--threads", action="append", type=int)
    options.add_argument("--runtime", action="append", choices=RUNTIMES)
    options.add_argument("--steps", type=int, default=20)
    chosen = options.parse_args()
    runtimes = chosen.runtime or RUNTIMES
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    print("| case | threads | runtime | PyTorch | here | ratio | memory: PyTorch | here | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    ratios: dict[tuple[str, int], list[float]] = {}
    for name in chosen.case or CASES:
        with tempfile.TemporaryDirectory() as scratch:
            graphs = exported(CASES[name], runtimes, Path(scratch))
            for threads in chosen.threads or (1, 2):
                turn = compare(name, graphs, threads, chosen.steps)
                for runtime in graphs:
                    ratios.setdefault((runtime, threads), []).append(turn.ratios[runtime])
                    print(row(name, threads, runtime, turn), flush=True)
    for (runtime, threads), found in ratios.items():
        print(f"{runtime}, {threads} threads, median over models: {statistics.median(found):.2f}")
    for threads in chosen.threads or (1, 2):
        slices(threads, chosen.steps)


def exported(case: Case, runtimes: Sequence[str], folder: Path) -> dict[str, Path]:
    """The training step of `case` for each runtime that takes it."""
    graphs = {}
    for runtime in runtimes:
        try:
            graphs[runtime] = write_graph(case, "train", runtime, folder)
        except ExportError as error:
            print(f"{runtime}: {error}")
    return graphs


def row(name: str, threads: int, runtime: str, turn: Turn) -> str:
    times = " | ".join(f"{1e3 * turn.seconds[kind]:.1f} ms" for kind in ("pytorch", runtime))
    sizes = " | ".join(f"{turn.memory[kind] / 1e6:.0f} MB" for kind in ("pytorch", runtime))
    less = turn.memory[runtime] / turn.memory["pytorch"]
    ratio = turn.ratios[runtime]
    return f"| {name} | {threads} | {runtime} | {times} | {ratio:.2f} | {sizes} | {less:.2f} |"


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
