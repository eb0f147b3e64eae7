"""What a device's calibration found: how long operations take, and what the runtime adds.

Nothing in it knows a model: any graph's time and memory are predicted from it.
"""

import msgspec

CALIBRATION_VERSION = 1


class Timing(msgspec.Struct, frozen=True):
    """Seconds that one operation of this kind and these sizes took, the least of several runs."""

    kind: str
    sizes: tuple[int, ...]
    seconds: float


class MemoryOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent and the runtime hold besides tensors, bytes.

    `idle_bytes`: the agent's process before it opens a graph. `session_bytes`: code and tables that
    the first session brings into memory. `node_bytes`: for each node of an open graph.
    """

    idle_bytes: int
    session_bytes: int
    node_bytes: int


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
    run_s: float
    port_s: float
    node_s: float
    loop_step_s: float
    memory: MemoryOverhead | None
