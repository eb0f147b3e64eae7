"""Child process of the calibration: memory of the agent and its runtime without any tensors.

Prints a MemoryOverhead as JSON, or null if the system does not report the memory of a process.
"""

import sys

import msgspec

import device_agent.training.bundle_training  # noqa: F401 - the agent before it opens a bundle
from device_agent.runtime.onnx_runtime import OnnxSession
from device_agent.system import process_memory
from profiles.documents.calibration_record import MemoryOverhead

IDLE = process_memory.resident_bytes()
"""Memory of the idle agent, measured before the imports that only the calibration needs."""

from device_agent.profiling.calibration_cases import GRAPHS  # noqa: E402
from device_agent.profiling.operation_timing import random_inputs  # noqa: E402

COPIES = 24
"""Number of sessions to open. A single session may need less than a step of the allocator."""
WARMING: dict[str, dict[str, tuple[int, ...]]] = {
    "pointwise": dict.fromkeys("xwuv", (64,)),
    "images": {"x": (2, 4, 8, 8), "w": (2, 4, 8, 8), "p": (1, 4, 1, 1)},
    "convolution": {"x": (1, 4, 8, 8), "w": (4, 4, 3, 3)},
    "transposed": {"x": (1, 4, 8, 8), "w": (4, 4, 3, 3)},
    "product": {"x": (1, 8, 8), "w": (1, 8, 8)},
}
"""One graph of each kind with the shapes of its inputs. The first runs load the kernels' code."""
EXTRA_NODES = {"pointwise": 18, "images": 22}
"""How many more nodes each of these graphs has than `product`."""


def session_growth(graph: str, sessions: list[OnnxSession]) -> int:
    """Run `COPIES` new sessions of `graph` once each. Returns the growth of the process in bytes.

    The sessions are added to `sessions`, so that the next call does not reuse their memory.
    """
    before = process_memory.resident_bytes() or 0
    for _ in range(COPIES):
        sessions.append(OnnxSession(GRAPHS / f"{graph}.onnx", 1))
        sessions[-1].run(random_inputs(WARMING[graph]))
    return (process_memory.resident_bytes() or 0) - before


def measure_overhead() -> MemoryOverhead | None:
    """Measure the overhead in this process, which must not have opened a session before."""
    before = process_memory.resident_bytes()
    if IDLE is None or before is None:
        return None
    for name, shapes in WARMING.items():
        OnnxSession(GRAPHS / f"{name}.onnx", 1).run(random_inputs(shapes))
    session = (process_memory.resident_bytes() or 0) - before
    kept: list[OnnxSession] = []
    smallest = session_growth("product", kept)
    nodes = [
        (session_growth(name, kept) - smallest) / (COPIES * extra)
        for name, extra in EXTRA_NODES.items()
    ]
    # A planner must not underestimate, so the larger of the two estimates is used.
    return MemoryOverhead(
        idle_bytes=IDLE, session_bytes=session, node_bytes=max(0, round(max(nodes)))
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure_overhead()))
