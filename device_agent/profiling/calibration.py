"""Calibrates a device: times single operations in small graphs, for about a minute.

No part of a model runs. The runtime's own profiler times every operation inside a small graph, as
it would run inside a training step. The fastest of several runs count: they show the speed of the
device when no other program uses it.
"""

import datetime
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
from msgspec.structs import replace

from device_agent.profiling.calibration_cases import Case, Shape, cases
from device_agent.runtime.onnx_runtime import DESCRIPTION, OnnxSession, session_options
from device_agent.system import process_memory
from profiles.cost_model.workload import sizes_of
from profiles.documents.bundle_profile import this_machine
from profiles.documents.calibration_record import SHORTEST_S, Calibration, MemoryOverhead, Timing
from profiles.documents.device_profile import FIGURES, DeviceProfile

log = logging.getLogger(__name__)
GRAPHS = Path(__file__).with_name("calibration_graphs")
LENGTH_S = 40.0
"""How long operations are timed for in all."""
RUNS = (4, 200)
"""Least and most runs of a case, the first of which warms up."""
SHORT_RUNS = 300
OTHERS = 2**21
"""Numbers written between two runs: 8 MB, more than the private caches of a core hold."""
SUFFIX = "_kernel_time"
NODES = 64
"""Nodes of the graphs `row` and `side`."""
STEPS = (16, 272)
"""Short and long runs of the graph `loop`, whose body has `BODY_NODES` nodes."""
BODY_NODES = 2


def arrays(shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Inputs of these shapes, around 1 so that nothing overflows."""
    order = np.random.default_rng(0)
    return {n: order.uniform(0.5, 1.5, shape).astype(np.float32) for n, shape in shapes.items()}


class TimedGraph:
    """A graph under the runtime's profiler."""

    def __init__(self, name: str, threads: int, folder: Path) -> None:
        self._others = np.zeros(OTHERS, np.float32)
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
        feeds = arrays(shapes)
        least, most = RUNS
        end = time.monotonic() + seconds
        for done in range(most):
            if done >= least and time.monotonic() >= end:
                break
            # In a training step other layers run between two runs of a layer and evict its data
            # from the caches. Writing another array has the same effect.
            self._others += 1
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
                kind = event["name"].removesuffix(SUFFIX).split("-")[0]
                inputs, outputs = (shapes_of(event, end) for end in ("input", "output"))
                nodes = found.setdefault((kind, sizes_of(kind, inputs, outputs)), {})
                nodes.setdefault(event["name"], []).append(event["dur"] * 1e-6)
        return [
            Timing(kind, sizes, float(np.mean([quickest(runs) for runs in nodes.values()])))
            for (kind, sizes), nodes in found.items()
        ]


def quickest(seconds: Sequence[float]) -> float:
    """Mean of the fastest quarter of the runs."""
    return float(np.mean(sorted(seconds)[: max(1, len(seconds) // 4)]))


def shapes_of(event: Mapping[str, Any], end: str) -> list[Shape]:
    """Shapes of the inputs or outputs in an event of the profiler; `end` is "input" or "output"."""
    return [tuple(*one.values()) for one in event["args"][f"{end}_type_shape"]]


def timed(all_cases: Iterable[Case], threads: int, length_s: float) -> list[Timing]:
    """Time the operations of `all_cases` for about `length_s` seconds in total."""
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


def least(name: str, shapes: Mapping[str, Shape], threads: int) -> float:
    """Shortest duration in seconds of a whole run, with a session as the agent opens it."""
    session = OnnxSession(GRAPHS / f"{name}.onnx", threads)
    feeds = arrays(shapes)
    seconds = []
    for _ in range(SHORT_RUNS):
        start = time.perf_counter()
        session.run(feeds)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@dataclass(frozen=True)
class Overheads:
    """Time of a run in addition to its operations, in seconds; see Calibration."""

    run_s: float
    port_s: float
    node_s: float
    loop_step_s: float


def overheads(threads: int) -> Overheads:
    """Measure the overheads with tiny graphs that differ in a single property."""
    one = least("product", {"x": (1, 1, 1), "w": (1, 1, 1)}, threads)  # 1 node, 3 ports
    row = least("row", {"x": (1,)}, threads)  # NODES nodes, 2 ports
    side = least(
        "side", {f"x{n}": (1,) for n in range(NODES)}, threads
    )  # NODES nodes, 2 ports each
    node_s = max(0.0, row - one) / (NODES - 1)
    port_s = max(0.0, side - row) / (2 * NODES - 2)
    few, many = (least("loop", {"s0": (1,), "x": (steps, 1)}, threads) for steps in STEPS)
    return Overheads(
        run_s=max(0.0, one - node_s - 3 * port_s),
        port_s=port_s,
        node_s=node_s,
        loop_step_s=max(0.0, (many - few) / (STEPS[1] - STEPS[0]) - BODY_NODES * node_s),
    )


def without_profiler(timings: Sequence[Timing], node_s: float) -> tuple[Timing, ...]:
    """Subtract the time that the profiler itself adds, about a microsecond per operation.

    The smallest operation takes `node_s` without the profiler, so its timing shows the exact time.
    """
    smallest = min(timing.seconds for timing in timings)
    least_s = max(node_s, SHORTEST_S)
    return tuple(
        Timing(t.kind, t.sizes, max(least_s, t.seconds - smallest + node_s)) for t in timings
    )


def calibrate(threads: int = 0, length_s: float = LENGTH_S) -> Calibration:
    """Calibrate this device with `threads` threads (0: one for each core).

    `length_s` seconds go to operations, a few more to the rest. Each stage is logged.
    """
    log.info("what a run itself takes, a few seconds")
    small = overheads(threads)
    log.info("operations, about %.0f s", length_s)
    timings = timed(cases(), threads, length_s)
    log.info("memory of the runtime")
    return Calibration(
        runtime=DESCRIPTION,
        threads=threads,
        timings=without_profiler(timings, small.node_s),
        run_s=small.run_s,
        port_s=small.port_s,
        node_s=small.node_s,
        loop_step_s=small.loop_step_s,
        memory=memory_overhead(),
    )


def memory_overhead() -> MemoryOverhead | None:
    """Memory of the agent and its runtime without tensors, measured in a fresh process.

    None if the system does not report it.
    """
    command = [sys.executable, "-m", "device_agent.profiling.idle_memory_process"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        return None
    return msgspec.json.decode(done.stdout, type=MemoryOverhead | None)


def device_profile(name: str, calibration: Calibration, folder: Path) -> DeviceProfile:
    """Create the profile that the planner reads.

    Args:
        name: Name of the device.
        calibration: The device's calibration.
        folder: A folder on the disk that stores bundles. Its free space is recorded.

    Returns:
        The profile. Figures that the system does not report are None.
    """
    machine = this_machine(DESCRIPTION)
    found = DeviceProfile(
        name=name,
        date=datetime.date.today().isoformat(),
        cores=machine.cpu_count,
        memory_bytes=machine.memory_bytes,
        memory_available_bytes=process_memory.available_bytes(),
        storage_free_bytes=shutil.disk_usage(folder).free,
        machine=machine,
        calibration=calibration,
    )
    known = [figure for figure in FIGURES if getattr(found, figure) is not None]
    return replace(found, sources=dict.fromkeys(known, "measured on the device"))
