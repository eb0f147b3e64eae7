"""Child process of the calibration: what the agent and its runtime hold besides tensors.

Prints a MemoryOverhead as JSON, or null where the system does not say.
"""

import sys

import msgspec

import device_agent.training.bundle_training  # noqa: F401 - the agent as it is before a bundle is opened
from device_agent.runtime.onnx_runtime import OnnxSession
from device_agent.system import process_memory
from profiles.documents.calibration_record import MemoryOverhead

IDLE = process_memory.resident_bytes()
"""The agent's, ahead of what only the calibration imports."""

from device_agent.profiling.calibration import GRAPHS, arrays  # noqa: E402

COPIES = 24
"""Sessions open at once, so that what one takes stands out from the allocator's steps."""
WARMING: dict[str, dict[str, tuple[int, ...]]] = {
    "pointwise": dict.fromkeys("xwuv", (64,)),
    "images": {"x": (2, 4, 8, 8), "w": (2, 4, 8, 8), "p": (1, 4, 1, 1)},
    "convolution": {"x": (1, 4, 8, 8), "w": (4, 4, 3, 3)},
    "transposed": {"x": (1, 4, 8, 8), "w": (4, 4, 3, 3)},
    "product": {"x": (1, 8, 8), "w": (1, 8, 8)},
}
"""One graph of every sort: their kernels' code is what a session brings into memory."""
LARGER = {"pointwise": 18, "images": 22}
"""How many nodes these graphs have more than `product`."""


def held(graph: str, sessions: list[OnnxSession]) -> int:
    """Bytes by which the process is larger for `COPIES` sessions of `graph`, each run once."""
    before = process_memory.resident_bytes() or 0
    for _ in range(COPIES):
        sessions.append(OnnxSession(GRAPHS / f"{graph}.onnx", 1))
        sessions[-1].run(arrays(WARMING[graph]))
    return (process_memory.resident_bytes() or 0) - before


def overhead() -> MemoryOverhead | None:
    """Measure in this process, which must be a fresh one."""
    before = process_memory.resident_bytes()
    if IDLE is None or before is None:
        return None
    for name, shapes in WARMING.items():
        OnnxSession(GRAPHS / f"{name}.onnx", 1).run(arrays(shapes))
    session = (process_memory.resident_bytes() or 0) - before
    kept: list[OnnxSession] = []
    one = held("product", kept)
    nodes = [(held(name, kept) - one) / (COPIES * more) for name, more in LARGER.items()]
    return MemoryOverhead(
        idle_bytes=IDLE, session_bytes=session, node_bytes=max(0, round(max(nodes)))
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(overhead()))
