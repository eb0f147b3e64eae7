"""Calibrates a device: measures how fast single operations are, in about a minute.

No part of a model runs. The runtime's own profiler times every operation inside a small graph, as
it would run inside a training step. The fastest of several runs count: they show the speed of the
device when no other program uses it.
"""

import datetime
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from device_agent.profiling.calibration_cases import GRAPHS, Shape, all_cases
from device_agent.profiling.operation_timing import random_inputs, subtract_profiler, time_cases
from device_agent.runtime.blocked_probe import block_size
from device_agent.runtime.onnx_runtime import DESCRIPTION, OnnxSession
from device_agent.system import process_memory
from profiles.documents.bundle_profile import this_machine
from profiles.documents.calibration_record import Calibration, MemoryOverhead
from profiles.documents.device_profile import FIGURES, DeviceProfile

log = logging.getLogger(__name__)
LENGTH_S = 40.0
"""Total time for timing operations."""
SHORT_RUNS = 300
"""Runs of each graph that measures an overhead."""
NODES = 64
"""Nodes of the graphs `row` and `side`."""
STEPS = (16, 272)
"""Iterations of a short and a long run of the graph `loop`."""
BODY_NODES = 2
"""Nodes in the body of the graph `loop`."""


def shortest_run_s(name: str, shapes: Mapping[str, Shape], threads: int) -> float:
    """Shortest duration in seconds of a whole run, with a session as the agent opens it."""
    session = OnnxSession(GRAPHS / f"{name}.onnx", threads)
    feeds = random_inputs(shapes)
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


def measure_overheads(threads: int) -> Overheads:
    """Measure the overheads with tiny graphs that differ in a single property."""
    one = shortest_run_s("product", {"x": (1, 1, 1), "w": (1, 1, 1)}, threads)  # 1 node, 3 ports
    row = shortest_run_s("row", {"x": (1,)}, threads)  # NODES nodes, 2 ports
    # NODES nodes, 2 ports each
    side = shortest_run_s("side", {f"x{n}": (1,) for n in range(NODES)}, threads)
    node_s = max(0.0, row - one) / (NODES - 1)
    port_s = max(0.0, side - row) / (2 * NODES - 2)
    few, many = (shortest_run_s("loop", {"s0": (1,), "x": (steps, 1)}, threads) for steps in STEPS)
    return Overheads(
        run_s=max(0.0, one - node_s - 3 * port_s),
        port_s=port_s,
        node_s=node_s,
        loop_step_s=max(0.0, (many - few) / (STEPS[1] - STEPS[0]) - BODY_NODES * node_s),
    )


def calibrate(threads: int = 0, length_s: float = LENGTH_S) -> Calibration:
    """Calibrate this device. The start of each stage is logged.

    Args:
        threads: Threads of the runtime; 0 for one per core.
        length_s: Time in seconds for timing operations. The other stages take a few seconds more.

    Returns:
        The calibration.
    """
    log.info("Measuring the overhead of a run, a few seconds")
    overheads = measure_overheads(threads)
    log.info("Timing operations, about %.0f s", length_s)
    timings = time_cases(all_cases(block_size() is not None), threads, length_s)
    log.info("Measuring the memory of the runtime")
    return Calibration(
        runtime=DESCRIPTION,
        threads=threads,
        timings=subtract_profiler(timings, overheads.node_s),
        run_s=overheads.run_s,
        port_s=overheads.port_s,
        node_s=overheads.node_s,
        loop_step_s=overheads.loop_step_s,
        memory=measure_memory(),
    )


def measure_memory() -> MemoryOverhead | None:
    """Measure the memory of the agent and its runtime without tensors, in a fresh process.

    Returns None if the system does not report the memory of a process.
    """
    command = [sys.executable, "-m", "device_agent.profiling.calibrate_memory_process"]
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
