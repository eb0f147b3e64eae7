"""Times single operations inside small graphs with the runtime's own profiler."""

import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from device_agent.profiling.calibration_cases import GRAPHS, Case, Shape
from device_agent.runtime.onnx_runtime import session_options
from profiles.cost_model.workload import sizes_of
from profiles.documents.calibration_record import SHORTEST_S, Timing

RUNS = (4, 200)
"""Fewest and most runs of a case. The first run of each case warms up the caches."""
EVICTION_ELEMENTS = 2**21
"""Elements that are written between two runs: 8 MB, more than the private caches of a core hold."""
SUFFIX = "_kernel_time"


def random_inputs(shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Random inputs of these shapes, with values around 1 so that nothing overflows."""
    generator = np.random.default_rng(0)
    return {
        name: generator.uniform(0.5, 1.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


class TimedGraph:
    """A graph that runs under the runtime's profiler."""

    def __init__(self, name: str, threads: int, folder: Path) -> None:
        """Open the calibration graph `name`. The profiler writes its events to `folder`."""
        self._evicting = np.zeros(EVICTION_ELEMENTS, np.float32)
        options = session_options(threads)
        # An optimised graph has other nodes, whose names no longer tell the operation.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / name)
        self._session = onnxruntime.InferenceSession(
            str(GRAPHS / f"{name}.onnx"), options, providers=["CPUExecutionProvider"]
        )

    def run(self, shapes: Mapping[str, Shape], seconds: float) -> None:
        """Run repeatedly for about `seconds`, within the limits of `RUNS`."""
        feeds = random_inputs(shapes)
        fewest, most = RUNS
        end = time.monotonic() + seconds
        for done in range(most):
            if done >= fewest and time.monotonic() >= end:
                break
            # In a training step other layers run between two runs of a layer and evict its data
            # from the caches. Writing another array has the same effect.
            self._evicting += 1
            self._session.run(None, feeds)

    def timings(self) -> list[Timing]:
        """Time of each operation at each of its sizes, averaged over the nodes of that kind.

        The profiler truncates to whole microseconds. The minimum would therefore be too small, so
        the mean of the fastest runs is used.
        """
        file = Path(self._session.end_profiling())
        events = json.loads(file.read_bytes())
        file.unlink()
        found: dict[tuple[str, tuple[int, ...]], dict[str, list[float]]] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith(SUFFIX):
                # The names of the nodes begin with the kind of the operation.
                kind = event["name"].removesuffix(SUFFIX).split("-")[0]
                inputs, outputs = (event_shapes(event, end) for end in ("input", "output"))
                nodes = found.setdefault((kind, sizes_of(kind, inputs, outputs)), {})
                nodes.setdefault(event["name"], []).append(event["dur"] * 1e-6)
        return [
            Timing(kind, sizes, float(np.mean([fastest_mean(runs) for runs in nodes.values()])))
            for (kind, sizes), nodes in found.items()
        ]


def fastest_mean(seconds: Sequence[float]) -> float:
    """Mean of the fastest quarter of the runs."""
    return float(np.mean(sorted(seconds)[: max(1, len(seconds) // 4)]))


def event_shapes(event: Mapping[str, Any], end: str) -> list[Shape]:
    """Shapes of the inputs or outputs in an event of the profiler; `end` is "input" or "output"."""
    return [tuple(*one.values()) for one in event["args"][f"{end}_type_shape"]]


def time_cases(cases: Iterable[Case], threads: int, length_s: float) -> list[Timing]:
    """Time the operations of some cases.

    Args:
        cases: The graphs and input shapes to run.
        threads: Threads of the runtime; 0 for one per core.
        length_s: Total time in seconds, about. If it has passed, each remaining case still gets
            its fewest runs.

    Returns:
        The timings, which include the time that the profiler adds.
    """
    left = list(cases)
    end = time.monotonic() + length_s
    with tempfile.TemporaryDirectory() as scratch:
        graphs: dict[str, TimedGraph] = {}
        while left:
            name, shapes = left.pop(0)
            if name not in graphs:
                graphs[name] = TimedGraph(name, threads, Path(scratch))
            graphs[name].run(shapes, max(0.0, end - time.monotonic()) / (len(left) + 1))
        return [timing for graph in graphs.values() for timing in graph.timings()]


def subtract_profiler(timings: Sequence[Timing], node_s: float) -> tuple[Timing, ...]:
    """Subtract the time that the profiler adds to every operation, about a microsecond.

    Args:
        timings: Timings of operations under the profiler.
        node_s: Time in seconds of the smallest operation without the profiler. Its difference to
            the smallest timing is what the profiler adds.

    Returns:
        The timings without the profiler. None is shorter than `SHORTEST_S`.
    """
    smallest = min(timing.seconds for timing in timings)
    floor_s = max(node_s, SHORTEST_S)
    return tuple(
        Timing(t.kind, t.sizes, max(floor_s, t.seconds - smallest + node_s)) for t in timings
    )
