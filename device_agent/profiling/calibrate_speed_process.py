"""Child process of the calibration: measures how fast single operations are.

    python -m device_agent.profiling.calibrate_speed_process THREADS SECONDS

Prints a line of JSON for each message about the progress. The last line is a Calibration whose
field `memory` is null. The runtime's own profiler times every operation inside a small graph, as in
a training step. Of several runs, the fastest run counts, because other programs disturbed it least.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from device_agent.profiling.calibration_cases import GRAPHS, Shape, all_cases
from device_agent.profiling.operation_timing import (
    random_inputs,
    subtract_profiler,
    time_cases,
)
from device_agent.profiling.time_budget import Budget
from device_agent.runtime.blocked_probe import block_size
from device_agent.runtime.onnx_runtime import OnnxSession, description
from device_agent.system import process_memory
from profiles.documents.calibration_record import Calibration

Say = Callable[[str], None]
SHORT_RUNS = (5, 300)
"""Fewest and most runs of each graph that measures an overhead."""
OVERHEAD_SHARE = 0.15
"""Share of the time in which the overheads are measured."""
NODES = 64
"""Nodes of the graphs `row` and `side`."""
STEPS = (16, 272)
"""Iterations of a short and a long run of the graph `loop`."""
BODY_NODES = 2
"""Nodes in the body of the graph `loop`."""
OVERHEAD_GRAPHS: tuple[tuple[str, Mapping[str, Shape]], ...] = (
    ("product", {"x": (1, 1, 1), "w": (1, 1, 1)}),  # 1 node, 3 ports
    ("row", {"x": (1,)}),  # NODES nodes, 2 ports
    ("side", {f"x{n}": (1,) for n in range(NODES)}),  # NODES nodes, 2 ports each
    *(("loop", {"s0": (1,), "x": (steps, 1)}) for steps in STEPS),
)


def shortest_run_s(
    name: str, shapes: Mapping[str, Shape], threads: int, budget: Budget, share: float
) -> float:
    """Run a graph repeatedly, in a session like the agent's. Returns the shortest time in seconds.

    In total, the runs take about the share `share` of the time that is left in `budget`.
    """
    session = OnnxSession(GRAPHS / f"{name}.onnx", threads)
    feeds = random_inputs(shapes)
    seconds: list[float] = []
    for _ in budget.runs(SHORT_RUNS, share):
        start = time.perf_counter()
        session.run(feeds)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@dataclass(frozen=True)
class Overheads:
    """Time in seconds that a run takes in addition to its operations; see Calibration."""

    run_s: float
    port_s: float
    node_s: float
    loop_step_s: float


def measure_overheads(threads: int, budget: Budget) -> Overheads:
    """Measure the overheads with tiny graphs that differ in a single property."""
    share = OVERHEAD_SHARE / len(OVERHEAD_GRAPHS)
    single, row, side, few, many = (
        shortest_run_s(name, shapes, threads, budget, share) for name, shapes in OVERHEAD_GRAPHS
    )
    node_s = max(0.0, row - single) / (NODES - 1)
    port_s = max(0.0, side - row) / (2 * NODES - 2)
    return Overheads(
        run_s=max(0.0, single - node_s - 3 * port_s),
        port_s=port_s,
        node_s=node_s,
        loop_step_s=max(0.0, (many - few) / (STEPS[1] - STEPS[0]) - BODY_NODES * node_s),
    )


def calibrate_speed(threads: int, budget: Budget, say: Say) -> Calibration:
    """Measure overheads and operations within `budget`."""
    say("Measuring the overhead of a run, a few seconds")
    overheads = measure_overheads(threads, budget)
    say(f"Timing operations, at most {max(0.0, budget.left_s):.0f} s")
    # Use half of the free memory: other programs may need some of it.
    free = process_memory.available_bytes()
    room = math.inf if free is None else free / 2
    timed = time_cases(all_cases(block_size() is not None), threads, budget, say, room)
    if timed.share < 1:
        say(
            f"{timed.share:.0%} of the cases were timed: this device is slow, or short of memory. "
            "Predictions of its time have wider bounds."
        )
    return Calibration(
        runtime=description(),
        threads=threads,
        timings=subtract_profiler(timed.timings, overheads.node_s),
        timed_share=timed.share,
        run_s=overheads.run_s,
        port_s=overheads.port_s,
        node_s=overheads.node_s,
        loop_step_s=overheads.loop_step_s,
        memory=None,
    )


def _print(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _print(calibrate_speed(int(sys.argv[1]), Budget(float(sys.argv[2])), _print))
