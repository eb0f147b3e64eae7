"""Training steps of exported graphs against PyTorch eager: time, memory, and what slices save.

Every peer runs in its own process. They take turns, one step each, so that other load of the
machine affects all alike. All start from the same weights and batch, and their first losses must
agree. Run `make bench-step`; options: --case NAME, --runtime NAME, --threads N, --steps N.
`make bench-retired` adds onnxruntime-training 1.19.2, the last one, and trains by plain SGD.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from retired_graph import write_retired
from step_cases import CASES, PLAIN, RATE, Case

from device_agent.formats.graph_forms import BLOCKS, WINOGRAD, blocked_form, form_file
from device_agent.formats.manifest import Port
from exporters.memory.liveness import in_place_of
from exporters.onnx.forms.blocked_layout import blocked
from exporters.onnx.forms.winograd import winograd
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.program import ProgramSignature
from exporters.tflite.tflite_writer import to_tflite
from profiles.errors import ExportError
from toolkit.submodels.global_model import from_model
from toolkit.submodels.submodel import Submodel

PLAIN_FORM = "plain"
"""ONNX Runtime without blocked convolutions."""
WORKER = Path(__file__).with_name("step_worker.py")
WARM_UP = 2
"""Steps after the first one that are not timed."""
COMPILED = "torch.compile"
RUNTIMES = ("onnx", PLAIN_FORM, WINOGRAD, "litert", COMPILED)
RUNS = {PLAIN_FORM: "onnx", WINOGRAD: "onnx"}
"""The agent's runtime for a peer, where the names differ."""
RETIRED = "ort-training"
PAUSE_S = 0.01
LOSS_TOLERANCE = 1e-4
"""Relative; of float32 through twenty layers."""


class Peer:
    """A worker process that waits for requests; `loss` is its first step's."""

    def __init__(
        self,
        name: str,
        case: str,
        graph: Path,
        threads: int,
        python: str = sys.executable,
        warm_up: int = WARM_UP,
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        given = (RUNS.get(name, name), case, graph, threads, warm_up)
        self.process = subprocess.Popen(
            [python, str(WORKER), *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.loss = self.read()

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
    """One case: seconds of every step, and bytes above the idle process, by peer."""

    seconds: dict[str, list[float]]
    memory: dict[str, float]

    def ratio(self, ours: str, theirs: str) -> float:
        """The median over pairs of steps that took turns."""
        pairs = zip(self.seconds[ours], self.seconds[theirs], strict=True)
        return statistics.median(a / b for a, b in pairs)


def signature(submodel: Submodel, name: str) -> ProgramSignature:
    return next(s for s in submodel.program.signatures if s.name == name)


def arrays(case: Case, submodel: Submodel, ports: tuple[Port, ...]) -> dict[str, np.ndarray]:
    """What a step is fed: the case's weights, samples and labels, zeros for the optimizer."""
    model, x, y = case.problem()
    values = submodel.cut(from_model(model))
    given = {"samples": x, "labels": y}
    fed = {}
    for port in ports:
        if port.kind in given:
            fed[port.name] = given[port.kind].numpy()
        elif port.state in values:
            fed[port.name] = values[port.state].detach().numpy()
        else:
            start = RATE if port.kind == "scalar" else 0
            fed[port.name] = np.full(port.shape, start, np.float32)
    return fed


def write_graph(case: Case, name: str, runtime: str, folder: Path) -> Path:
    """The signature `name` of `case` as a graph, and beside it what it is fed."""
    submodel = case.submodel()
    chosen = signature(submodel, name)
    graph = folder / runtime / f"{name}.{'tflite' if runtime == 'litert' else 'onnx'}"
    graph.parent.mkdir(exist_ok=True)
    data = to_tflite([chosen]) if runtime == "litert" else to_onnx(chosen)
    if runtime == WINOGRAD:
        data = winograd(data) or data
    graph.write_bytes(data)
    if runtime == "onnx" and chosen.trains:
        for block in BLOCKS:
            if form := blocked(data, block, case.batch):
                graph.with_name(form_file(graph.name, blocked_form(block))).write_bytes(form)
    fed = arrays(case, submodel, chosen.inputs)
    replaced = chosen.replacing if runtime == "litert" else in_place_of(data)
    fed["in place"] = np.array(replaced, str)
    np.savez(graph.with_suffix(".npz"), **fed)  # type: ignore[arg-type]
    return graph


def take_turns(peers: dict[str, Peer], steps: int, clock: str = "time") -> dict[str, list[float]]:
    """Seconds by `clock` of `steps` steps of every peer, one step each in turn.

    Each time in another order, and after a pause: threads of the last step still wait busily.
    """
    seconds: dict[str, list[float]] = {kind: [] for kind in peers}
    draw = random.Random(0)
    for _ in range(steps):
        for kind in draw.sample(list(peers), len(peers)):
            time.sleep(PAUSE_S)
            seconds[kind].append(peers[kind].ask(clock))
    return seconds


def compare(
    name: str, graphs: dict[str, Path], threads: int, steps: int, python: str | None
) -> Turn:
    """One case, step by step in turns; `python` runs the retired peer."""
    peers = {"pytorch": Peer("pytorch", name, Path(), threads)}
    for runtime, graph in graphs.items():
        own = python if python and runtime == RETIRED else sys.executable
        peers[runtime] = Peer(runtime, name, graph, threads, own)
    check_losses(name, peers)
    seconds = take_turns(peers, steps)
    memory = {kind: peer.ask("memory") for kind, peer in peers.items()}
    for peer in peers.values():
        peer.stop()
    return Turn(seconds, memory)


def check_losses(name: str, peers: dict[str, Peer]) -> None:
    """Raise RuntimeError unless all peers' first losses are PyTorch's: they do the same work."""
    right = float(str(peers["pytorch"].loss))
    for kind, peer in peers.items():
        loss = float(str(peer.loss))
        if not abs(loss - right) <= LOSS_TOLERANCE * abs(right):
            raise RuntimeError(f"{name}: the first loss of {kind} is {loss}, PyTorch's {right}.")


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
    options.add_argument("--retired", metavar="PYTHON", help="has onnxruntime-training 1.19.2")
    chosen = options.parse_args()
    threads = chosen.threads or (1, 2)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    names = chosen.case or list(CASES)
    if chosen.retired:
        names = [next(p for p in PLAIN if p.startswith(name)) for name in names]
    compare_all(names, chosen.runtime or RUNTIMES, threads, chosen.steps, chosen.retired)
    if not chosen.retired:
        for count in threads:
            slices(count, chosen.steps)


def compare_all(
    names: Sequence[str],
    runtimes: Sequence[str],
    threads: Sequence[int],
    steps: int,
    python: str | None,
) -> None:
    """Print a row for every case, number of threads and peer, and medians over the cases."""
    print("| case | threads | runtime | PyTorch | here | ratio | memory: PyTorch | here | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    ratios: dict[tuple[str, str, int], list[float]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            graphs = exported(name, runtimes, Path(scratch), python)
            for count in threads:
                turn = compare(name, graphs, count, steps, python)
                for runtime in graphs:
                    print(row(name, count, runtime, turn), flush=True)
                    for other in {"pytorch", RETIRED} & turn.seconds.keys() - {runtime}:
                        ratio = turn.ratio(runtime, other)
                        ratios.setdefault((runtime, other, count), []).append(ratio)
    for (runtime, other, count), own_ratios in sorted(ratios.items()):
        each = ", ".join(f"{ratio:.2f}" for ratio in own_ratios)
        median = statistics.median(own_ratios)
        print(f"{runtime} over {other}, {count} threads: {each}; median {median:.2f}")


def exported(
    name: str, runtimes: Sequence[str], folder: Path, python: str | None
) -> dict[str, Path]:
    """The training step of the case `name` for each peer that takes it."""
    case = {**CASES, **PLAIN}[name]
    writers = {kind: partial(write_graph, case, "train", kind, folder) for kind in runtimes}
    if COMPILED in writers:
        writers[COMPILED] = Path  # it reads no graph
    if python:
        writers[RETIRED] = partial(write_retired, case, folder, python)
    graphs = {}
    for runtime, write in writers.items():
        try:
            graphs[runtime] = write()
        except ExportError as error:
            print(f"{runtime}: {error}")
    return graphs


def row(name: str, threads: int, runtime: str, turn: Turn) -> str:
    medians = [statistics.median(turn.seconds[kind]) for kind in ("pytorch", runtime)]
    times = " | ".join(f"{1e3 * seconds:.1f} ms" for seconds in medians)
    sizes = " | ".join(f"{turn.memory[kind] / 1e6:.0f} MB" for kind in ("pytorch", runtime))
    less = turn.memory[runtime] / turn.memory["pytorch"]
    ratio = turn.ratio(runtime, "pytorch")
    return f"| {name} | {threads} | {runtime} | {times} | {ratio:.2f} | {sizes} | {less:.2f} |"


if __name__ == "__main__":
    main()
