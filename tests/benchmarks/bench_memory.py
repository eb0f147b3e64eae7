"""Peak memory of one training step: predicted from the graph, measured, and PyTorch's beside it.

    python tests/benchmarks/bench_memory.py ["resnet20 full" ...]

Each measurement is a fresh process on one thread: resident set once everything is imported (idle),
a few steps, the kernel's peak set back (/proc/self/clear_refs), more steps, the peak above idle.
Linux only. Run `make bench-memory`.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from device_agent import memory
from device_agent.onnx_runtime import OnnxSession

WARM_UP, STEPS = 3, 8
MB = 2**20
DIGITS = "digits_cnn cp:2.0"
"""Its personal step; PyTorch has no plain counterpart."""


def peak_above(idle: int | None, step: Callable[[], object]) -> tuple[float, float]:
    """Peak of some steps above `idle`, MB, and the median time of one, ms."""
    for _ in range(WARM_UP):
        step()
    if not memory.reset_peak() or idle is None:
        sys.exit("The peak is read from Linux's /proc/self; there is none here.")
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    peak = memory.peak_bytes()
    assert peak is not None
    return (peak - idle) / MB, 1e3 * statistics.median(seconds)


def measure_graph(folder: Path) -> None:
    """Print peak and time of the agent's session, and what is left when it is dropped."""
    np.random.default_rng()
    idle = memory.resident_bytes()
    sessions = [OnnxSession(folder / "step.onnx", threads=1)]
    with np.load(folder / "feeds.npz") as file:
        feeds = dict(file)

    def step() -> None:
        for name, array in sessions[0].run(feeds).items():
            if name.endswith("+"):
                feeds[name[:-1]] = array

    peak, milliseconds = peak_above(idle, step)
    held = sum(array.nbytes for array in feeds.values()) / MB
    sessions.clear()
    gc.collect()
    left = memory.resident_bytes()
    assert left is not None
    assert idle is not None
    print(peak, milliseconds, (left - idle) / MB - held)


def measure_eager(name: str) -> None:
    """Print peak and time of PyTorch's step."""
    import torch
    from step_cases import CASES, eager_step

    torch.set_num_threads(1)
    idle = memory.resident_bytes()
    print(*peak_above(idle, eager_step(CASES[name])))


def in_child(*arguments: str) -> list[float]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def write_step(name: str, folder: Path) -> bytes:
    """Write graph and first inputs of a case's step into `folder`; returns the graph."""
    import torch
    from step_cases import BATCH, CASES, Case, whole

    from exporters.onnx_writer import to_onnx
    from toolkit import models
    from toolkit.weights import from_model

    torch.manual_seed(0)
    case = CASES.get(name) or Case(models.digits_cnn, "cp:2.0", (1, 8, 8), whole, (1, 8, 8))
    model = case.model()
    submodel = replace(case, model=lambda: model).submodel()
    names = {"train", "personal_step"}
    signature = next(s for s in submodel.program.signatures if s.name in names)
    values = submodel.cut(from_model(model))
    feeds = {}
    for port in signature.inputs:
        shape = [BATCH if size is None else size for size in port.shape]
        match port.kind:
            case "samples":
                feeds[port.name] = case.batch().numpy()
            case "labels":
                feeds[port.name] = np.zeros(shape, np.int64)
            case "classes":
                feeds[port.name] = np.ones(shape, np.float32)
            case "scalar":
                feeds[port.name] = np.array(1e-3, np.float32)
            case _:
                value = values.get(str(port.state), torch.zeros(shape))
                feeds[port.name] = value.detach().numpy()
    graph = to_onnx(signature)
    (folder / "step.onnx").write_bytes(graph)
    np.savez(folder / "feeds.npz", **feeds)
    return graph


def report(name: str, alive: int) -> None:
    from step_cases import BATCH, CASES

    from exporters.footprint import footprint

    with tempfile.TemporaryDirectory() as place:
        found = footprint(write_step(name, Path(place)), BATCH)
        peak, milliseconds, left = in_child("--graph", place)
    row = [found.planned / MB, found.arena / MB, found.process / MB, peak]
    print(f"{name:24}" + "".join(f"{figure:9.1f}" for figure in row), end="")
    print(f"{100 * (row[2] / peak - 1):+7.1f}%{left:9.1f}{milliseconds:9.0f}", end="")
    if name in CASES:
        eager, eager_milliseconds = in_child("--eager", name)
        print(f"{eager:9.1f}{peak / eager:7.2f}{eager_milliseconds:9.0f}", end="")
    print(flush=True)
    for buffer in found.alive[:alive]:
        print(f"    {buffer.size / MB:7.2f}  {buffer.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="some of the cases (default: all)")
    parser.add_argument("--alive", type=int, default=0, help="list N tensors of the planned peak")
    parser.add_argument("--graph", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--eager", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.graph is not None:
        measure_graph(arguments.graph)
    elif arguments.eager is not None:
        measure_eager(arguments.eager)
    else:
        from step_cases import CASES

        head = ("planned", "arena", "process", "peak", "off", "left", "ms", "eager", "ratio", "ms")
        widths = (9, 9, 9, 9, 8, 9, 9, 9, 7, 9)
        line = "".join(f"{word:>{n}}" for word, n in zip(head, widths, strict=True))
        print(f"{'MB, batch 32':24}{line}")
        for name in arguments.cases or [*CASES, DIGITS]:
            report(name, arguments.alive)


if __name__ == "__main__":
    main()
