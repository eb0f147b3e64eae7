"""What a device's calibration found: how long operations take, and what the runtime adds.

Nothing in it knows a model: any graph's time and memory are predicted from it.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

CALIBRATION_VERSION = 1
LENGTHS = {
    "product": 4,
    "accumulated": 4,
    "convolution": 5,
    "transposed": 5,
    "broadcast": 2,
    "reduction": 2,
}
"""How many sizes operations of these kinds have; of all others one."""

Seconds = Annotated[float, Meta(ge=0, le=1e6)]
SHORTEST_S = 1e-9
"""An operation takes at least this: rates are logarithms."""
Taken = Annotated[float, Meta(ge=SHORTEST_S, le=1e6)]
Bytes = Annotated[int, Meta(ge=0, lt=2**53)]
Size = Annotated[int, Meta(ge=1, lt=2**53)]


class Timing(msgspec.Struct, frozen=True):
    """Seconds that one operation of this kind and these sizes took, the least of several runs."""

    kind: str
    sizes: tuple[Size, ...]
    seconds: Taken

    def __post_init__(self) -> None:
        wanted = LENGTHS.get(self.kind, 1)
        if len(self.sizes) != wanted:
            raise ValueError(f"a timing of {self.kind!r} has {wanted} sizes, not {len(self.sizes)}")


class MemoryOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent and the runtime hold besides tensors, bytes.

    `idle_bytes`: the agent's process before it opens a graph. `session_bytes`: code and tables that
    the first session brings into memory. `node_bytes`: for each node of an open graph.
    """

    idle_bytes: Bytes
    session_bytes: Bytes
    node_bytes: Bytes


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Rates and overheads of one device with one runtime and number of threads (0: all cores).

    `timings` hold what the runtime does around an operation. A run takes `run_s` and `port_s` for
    each of its inputs and outputs besides; a node that computes nothing takes `node_s`, a step of a
    loop `loop_step_s` besides its body. `memory` is None where the system does not say.
    """

    version: int = CALIBRATION_VERSION
    runtime: str
    threads: int
    timings: tuple[Timing, ...]
    run_s: Seconds
    port_s: Seconds
    node_s: Seconds
    loop_step_s: Seconds
    memory: MemoryOverhead | None
