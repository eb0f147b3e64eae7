"""Times single operations inside small graphs with the runtime's own profiler."""

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from device_agent.profiling.calibration_cases import GRAPHS, Case, Shape
from device_agent.profiling.case_order import spread
from device_agent.profiling.time_budget import Budget
from device_agent.runtime.onnx_runtime import session_options
from device_agent.system.process_memory import release_unused
from profiles.cost_model.workload import sizes_of
from profiles.documents.calibration_record import SHORTEST_S, Timing

RUNS = (3, 200)
"""Fewest and most runs of a case. The first run of each case warms up the caches."""
ARRAYS = 4
"""Memory of a case as a multiple of its inputs. The largest cases took 3.0 and 3.5 times their
inputs."""
RUNNING = 0.8
"""Share of the time for runs. The rest is for opening graphs and for unusually long runs."""
PROGRESS_S = 10.0
"""Time between two messages about the progress."""
EVICTION_ELEMENTS = 2**21
"""Elements that are written between two runs: 8 MB, more than the private caches of a core."""
SUFFIX = "_kernel_time"


def random_inputs(shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Draw random inputs of these shapes. The values are near 1 so that nothing overflows."""
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
        # Optimisation would replace nodes, and the names of the new nodes would not name the
        # operation.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / name)
        self._session = onnxruntime.InferenceSession(
            str(GRAPHS / f"{name}.onnx"), options, providers=["CPUExecutionProvider"]
        )

    def run(self, shapes: Mapping[str, Shape], budget: Budget, share: float) -> None:
        """Run the graph repeatedly. The runs take the share `share` of the time left in `budget`.

        `RUNS` gives the smallest and the largest number of runs.
        """
        feeds = random_inputs(shapes)
        for _ in budget.runs(RUNS, share):
            # In a training step other layers run between two runs of a layer and evict its data
            # from the caches. Writing another array has the same effect.
            self._evicting += 1
            self._session.run(None, feeds)

    def timings(self) -> list[Timing]:
        """Time of each kind of operation at each of its sizes, averaged over equal nodes.

        The profiler truncates times to whole microseconds, so the minimum would be too small. The
        mean of the fastest runs is used instead.
        """
        file = Path(self._session.end_profiling())
        events = json.loads(file.read_bytes())
        file.unlink()
        seconds: dict[tuple[str, tuple[int, ...]], dict[str, list[float]]] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith(SUFFIX):
                # The names of the nodes begin with the kind of the operation.
                kind = event["name"].removesuffix(SUFFIX).split("-")[0]
                inputs, outputs = (event_shapes(event, end) for end in ("input", "output"))
                nodes = seconds.setdefault((kind, sizes_of(kind, inputs, outputs)), {})
                nodes.setdefault(event["name"], []).append(event["dur"] * 1e-6)
        return [
            Timing(kind, sizes, float(np.mean([fastest_mean(runs) for runs in nodes.values()])))
            for (kind, sizes), nodes in seconds.items()
        ]


def fastest_mean(seconds: Sequence[float]) -> float:
    """Mean of the fastest quarter of the runs."""
    return float(np.mean(sorted(seconds)[: max(1, len(seconds) // 4)]))


def event_shapes(event: Mapping[str, Any], end: str) -> list[Shape]:
    """Shapes of the inputs or outputs in an event of the profiler; `end` is "input" or "output"."""
    return [tuple(*described.values()) for described in event["args"][f"{end}_type_shape"]]


@dataclass(frozen=True)
class Timed:
    """The result of timing some cases.

    `timings` include the time that the profiler adds. `share` is the share of the cases that were
    timed.
    """

    timings: list[Timing]
    share: float


def time_cases(
    cases: Iterable[Case],
    threads: int,
    budget: Budget,
    say: Callable[[str], None],
    room: float = math.inf,
) -> Timed:
    """Time the operations of some cases.

    When the time is over, the remaining cases are left out, but the first few cases of each graph
    are always timed. Cases that need too much memory are also left out.

    Args:
        cases: The graphs and input shapes to run.
        threads: Threads of the runtime; 0 for one per core.
        budget: The time that the cases may take.
        say: Takes messages about the progress.
        room: The largest memory of a case in bytes.
    """
    every = list(cases)
    chunks = spread(case for case in every if needed_bytes(case[1]) <= room)
    timings, done, told_s = list[Timing](), 0, budget.left_s
    total = sum(len(chunk.cases) for chunk in chunks)
    with tempfile.TemporaryDirectory() as scratch:
        for chunk in chunks:
            if not chunk.needed and budget.left_s <= 0:
                break
            # One session at a time: each keeps the memory of its largest run.
            graph = TimedGraph(chunk.graph, threads, Path(scratch))
            for shapes in chunk.cases:
                if not chunk.needed and budget.left_s <= 0:
                    break
                graph.run(shapes, budget, RUNNING / (total - done))
                done += 1
                if told_s - budget.left_s >= PROGRESS_S:
                    told_s = budget.left_s
                    say(f"Timed {done} of {total} cases")
            timings += graph.timings()
            del graph
            release_unused()
    return Timed(timings, done / len(every))


def needed_bytes(shapes: Mapping[str, Shape]) -> int:
    """The memory that a case takes, in bytes: inputs, and several results as large as these."""
    return ARRAYS * 4 * sum(math.prod(shape) for shape in shapes.values())


def subtract_profiler(timings: Sequence[Timing], node_s: float) -> tuple[Timing, ...]:
    """Subtract the time that the profiler adds to every operation, about a microsecond.

    Args:
        timings: Timings of operations under the profiler.
        node_s: Time in seconds of the smallest operation without the profiler. The difference
            between the smallest timing and `node_s` is the time that the profiler adds.

    Returns:
        The timings without the profiler's time. Each timing is at least `SHORTEST_S`.
    """
    smallest = min(timing.seconds for timing in timings)
    floor_s = max(node_s, SHORTEST_S)
    return tuple(
        Timing(t.kind, t.sizes, max(floor_s, t.seconds - smallest + node_s)) for t in timings
    )
