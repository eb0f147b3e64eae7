"""The calibration of a device: about a minute of small graphs, timed one operation at a time.

Nothing of any model is run. Every operation is timed by the runtime's own profiler inside a small
graph, as it will run inside a training step, and what counts is the least of several runs: what the
device can do when nothing else runs on it.
"""

import datetime
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from device_agent.calibration_cases import Case, Shape, cases
from device_agent.onnx_runtime import DESCRIPTION, OnnxSession, session_options
from profiles.calibration import Calibration, Timing
from profiles.workload import sizes_of

GRAPHS = Path(__file__).with_name("calibration_graphs")
LENGTH_S = 40.0
"""How long operations are timed for in all."""
RUNS = (4, 200)
"""Least and most runs of a case, the first of which warms up."""
SHORT_RUNS = 300
SUFFIX = "_kernel_time"
NODES = 64
"""Nodes of the graphs `row` and `side`."""
STEPS = (16, 272)

Report = Callable[[str], None]


def arrays(shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Inputs of these shapes, around 1 so that nothing overflows."""
    order = np.random.default_rng(0)
    return {n: order.uniform(0.5, 1.5, shape).astype(np.float32) for n, shape in shapes.items()}


class TimedGraph:
    """A graph under the runtime's profiler."""

    def __init__(self, name: str, threads: int, folder: Path) -> None:
        options = session_options(threads)
        # As it stands in the file: the names of its nodes say what they are.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / name)
        self._session = onnxruntime.InferenceSession(
            str(GRAPHS / f"{name}.onnx"), options, providers=["CPUExecutionProvider"]
        )

    def run(self, shapes: Mapping[str, Shape], seconds: float) -> None:
        """Run with inputs of these shapes for about `seconds`, within `RUNS`."""
        feeds = arrays(shapes)
        least, most = RUNS
        end = time.monotonic() + seconds
        for done in range(most):
            if done >= least and time.monotonic() >= end:
                break
            self._session.run(None, feeds)

    def timings(self) -> list[Timing]:
        """Time of each operation that was run, at each of its sizes; nodes of a kind are averaged.

        The profiler cuts off microseconds: the mean of the quickest runs is right, the least is
        too small.
        """
        file = Path(self._session.end_profiling())
        events = json.loads(file.read_bytes())
        file.unlink()
        found: dict[tuple[str, tuple[int, ...]], dict[str, list[float]]] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith(SUFFIX):
                kind = event["name"].removesuffix(SUFFIX).split("-")[0]
                inputs, outputs = (shapes_of(event, end) for end in ("input", "output"))
                nodes = found.setdefault((kind, sizes_of(kind, inputs, outputs)), {})
                nodes.setdefault(event["name"], []).append(event["dur"] * 1e-6)
        return [
            Timing(kind, sizes, float(np.mean([quickest(runs) for runs in nodes.values()])))
            for (kind, sizes), nodes in found.items()
        ]


def quickest(seconds: Sequence[float]) -> float:
    """Mean of the quickest quarter."""
    return float(np.mean(sorted(seconds)[: max(1, len(seconds) // 4)]))


def shapes_of(event: Mapping[str, Any], end: str) -> list[Shape]:
    """Shapes of the inputs or outputs that a profiler's event tells of."""
    return [tuple(*one.values()) for one in event["args"][f"{end}_type_shape"]]


def timed(all_cases: Iterable[Case], threads: int, length_s: float) -> list[Timing]:
    """Timings of the operations in `all_cases`, in about `length_s` seconds."""
    left = list(all_cases)
    end = time.monotonic() + length_s
    with tempfile.TemporaryDirectory() as scratch:
        graphs: dict[str, TimedGraph] = {}
        while left:
            name, shapes = left.pop(0)
            if name not in graphs:
                graphs[name] = TimedGraph(name, threads, Path(scratch))
            graphs[name].run(shapes, max(0.0, end - time.monotonic()) / (len(left) + 1))
        return [timing for graph in graphs.values() for timing in graph.timings()]


def least(name: str, shapes: Mapping[str, Shape], threads: int, runs: int = SHORT_RUNS) -> float:
    """Least seconds of a whole run as the agent makes it."""
    session = OnnxSession(GRAPHS / f"{name}.onnx", threads)
    feeds = arrays(shapes)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        session.run(feeds)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
