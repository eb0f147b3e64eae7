"""The result of calibrating a device: the times of operations and the overhead of the runtime.

This result is enough to predict the time and memory of any graph.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

CALIBRATION_VERSION = 1
STALE_DAYS = 90
"""A plan warns about calibrations that are older than this, in days."""
LENGTHS = {
    "product": 4,
    "accumulated": 4,
    "convolution": 5,
    "transposed": 5,
    "blocked": 5,
    "broadcast": 2,
    "reduction": 2,
}
"""The number of sizes that describe an operation; 1 for all other kinds."""

Seconds = Annotated[float, Meta(ge=0, le=1e6)]
SHORTEST_S = 1e-9
"""An operation takes at least this long, because predictions use the logarithm of a rate."""
Taken = Annotated[float, Meta(ge=SHORTEST_S, le=1e6)]
Bytes = Annotated[int, Meta(ge=0, lt=2**53)]
Size = Annotated[int, Meta(ge=1, lt=2**53)]


class Timing(msgspec.Struct, frozen=True):
    """Time of one operation with this kind and these sizes: the shortest time of several runs."""

    kind: str
    sizes: tuple[Size, ...]
    seconds: Taken

    def __post_init__(self) -> None:
        wanted = LENGTHS.get(self.kind, 1)
        if len(self.sizes) != wanted:
            raise ValueError(f"a timing of {self.kind!r} has {wanted} sizes, not {len(self.sizes)}")


class MemoryOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the agent and the runtime in addition to tensors, in bytes.

    `idle_bytes`: the process of the agent before it opens a graph. `session_bytes`: code and tables
    that the first session loads. `node_bytes`: bytes for each node of an open graph.
    `array_copies`: how many copies of the inputs and outputs exist during a run.
    """

    idle_bytes: Bytes
    session_bytes: Bytes
    node_bytes: Bytes
    array_copies: Annotated[int, Meta(ge=1, le=100)] = 1


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Times and overheads of a device for one runtime and one number of threads (0: all cores).

    `timings` include the runtime's own work for each operation. A run takes `run_s` longer than its
    operations, and `port_s` more for each input and output. A node that computes nothing takes
    `node_s`. A step of a loop takes `loop_step_s` more than its body. Each byte that enters or
    leaves a run takes `byte_s`, because web pages copy inputs and outputs. `memory` is None if the
    system does not report its memory. If the device was too slow to time all cases, `timed_share`
    is below 1.
    """

    version: int = CALIBRATION_VERSION
    runtime: str
    threads: int
    timings: tuple[Timing, ...]
    run_s: Seconds
    port_s: Seconds
    node_s: Seconds
    loop_step_s: Seconds
    byte_s: Seconds = 0.0
    memory: MemoryOverhead | None
    timed_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
