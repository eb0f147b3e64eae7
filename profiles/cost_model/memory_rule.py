"""The rule that predicts how much memory a training takes, and its constants.

Three figures describe memory, in bytes. They count different parts:

- planned tensors: the tensors of one run that are in memory at the same time, including inputs and
  constants.
- runtime arena: the memory that the runtime requests for intermediate tensors, including the gaps
  that its allocator leaves.
- process peak: all memory of the process at its peak: the arenas, inputs, outputs and state, and
  the runtime's data for each session.

The functions here return the growth: the process peak minus the memory of the idle agent.
`exporters/memory/` computes the other two figures from a graph.

The rule for one or more signatures that are open at the same time:

    growth = session + state + max over signatures (inputs - state + outputs) + sum of kept bytes
    kept bytes of a signature = arena + node_bytes * nodes + further copies of inputs and outputs
    process peak = idle agent + growth

- `session` is the code and tables of the runtime. Each process loads them only one time.
- `state` (weights, optimizer state, buffers) is shared by the signatures, so each tensor counts
  once. A tensor of a personal model counts twice: until the round ends, the device keeps a copy of
  the personal model from before the round.
- An output that is written over the old state takes no additional memory, so it does not count.
- Only one signature runs at a time. So inputs (without state) and outputs count for only one
  signature, the signature with the largest sum.
- A session keeps its arena and its nodes in memory until it is closed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from profiles.documents.calibration_record import MemoryOverhead


@dataclass(frozen=True)
class RuntimeOverhead:
    """The memory of a runtime in addition to the tensors of a graph.

    `session_bytes`: code and tables that the first session of a process loads, for any graph.
    `node_bytes`: bytes for each node of an open graph. `array_copies`: how many copies of the
    inputs and outputs exist during a run, including the copies that the agent makes.
    """

    session_bytes: int
    node_bytes: int
    array_copies: int


ONNX = RuntimeOverhead(session_bytes=10 << 20, node_bytes=5300, array_copies=1)
"""Measured on x86-64 Linux with onnxruntime 1.31.1."""
LITERT = RuntimeOverhead(session_bytes=14 << 20, node_bytes=3000, array_copies=2)
"""LiteRT copies inputs and outputs into its own tensors, so they exist twice."""
RUNTIMES: Mapping[str, RuntimeOverhead] = {"onnx": ONNX, "litert": LITERT}
UNKNOWN_RUNTIME = RuntimeOverhead(session_bytes=0, node_bytes=0, array_copies=1)

UNCALIBRATED = MemoryOverhead(
    idle_bytes=60 * 10**6, session_bytes=ONNX.session_bytes, node_bytes=ONNX.node_bytes
)
"""Used for devices without a calibration. Measured on x86-64 Linux with ONNX Runtime."""

IN_BROWSER = MemoryOverhead(
    idle_bytes=100 * 10**6, session_bytes=220 << 20, node_bytes=ONNX.node_bytes, array_copies=7
)
"""Used for pages, which cannot measure their memory. Fitted to the peaks of `make bench-page` in
Chromium on x86-64 Linux. They include earlier results that the browser has not yet freed."""
WEB_RUNTIME = "onnxruntime-web"
"""If a page has measured a calibration, its `runtime` begins with this."""

RELATIVE_ERROR = 0.06
"""A measured growth may exceed its prediction by this share."""
TRAINING_RESERVE_BYTES = 6 << 20
"""The agent adds this to a predicted growth, for reading the bundle and data and running stages."""
AGENT_RESERVE_BYTES = 13 << 20
"""A plan adds this to a calibrated process peak. The calibration measures an idle agent that has
no connection and no bundle open; these take 6 MB before and 6 MB during training on x86-64."""
START_VARIATION_BYTES = 1 << 20
"""The memory of the idle agent differs by up to this between two starts."""
RUNTIME_CODE_BYTES = 10 << 20
"""The first run of a graph loads this much of the runtime's libraries, in bytes. They are mapped
from files, so a limit on the process's own data does not count them."""


@dataclass(frozen=True)
class SignatureMemory:
    """Bytes of one open signature.

    `inputs` and `outputs` are bytes for one run. `state` is the part of `inputs` that is the
    device's state. `kept` is the rest of the session's memory: arena, nodes, and further copies of
    inputs and outputs.
    """

    inputs: int
    outputs: int
    state: int
    kept: int


def kept_bytes(arena: int, nodes: int, node_bytes: int) -> int:
    """Bytes that a session keeps for its graph: its runtime arena and its nodes."""
    return arena + node_bytes * nodes


def training_growth(signatures: Sequence[SignatureMemory], state: int, session_bytes: int) -> int:
    """The growth while `signatures` are open at the same time, by the rule of this module.

    Args:
        signatures: The open signatures; at least one.
        state: Bytes of all state tensors in memory, as `state_bytes` counts them.
        session_bytes: `session_bytes` of a RuntimeOverhead or of a calibration.
    """
    batch = max(signature.inputs - signature.state + signature.outputs for signature in signatures)
    return session_bytes + state + batch + sum(signature.kept for signature in signatures)


def run_growth(
    runtime: RuntimeOverhead, inputs: int, outputs: int, arena: int, nodes: int, over: int = 0
) -> int:
    """The growth while only one signature is open. Manifests store it as `peak_bytes`.

    Args:
        runtime: The overhead of the runtime that runs the graph.
        inputs: Bytes of the inputs, including the state and the constants of the graph.
        outputs: Bytes of the outputs.
        arena: Bytes of the runtime arena.
        nodes: Number of nodes of the graph that the runtime keeps in memory.
        over: Bytes of the outputs that are written over inputs and so take no additional memory.
    """
    copies = (runtime.array_copies - 1) * (inputs + outputs)
    kept = copies + kept_bytes(arena, nodes, runtime.node_bytes)
    # A signature that is open alone shares no state, so all of its inputs count here.
    alone = SignatureMemory(inputs=inputs, outputs=outputs - over, state=0, kept=kept)
    return training_growth([alone], 0, runtime.session_bytes)


def kept_of_peak(peak: int, inputs: int, outputs: int, session_bytes: int) -> int:
    """The kept bytes of a signature whose `run_growth` is `peak`; never negative."""
    return max(0, peak - session_bytes - inputs - outputs)


def state_bytes(sizes: Mapping[str, int], personal: Collection[str]) -> int:
    """Bytes of the state tensors `sizes`; tensors in `personal` count twice."""
    return sum(size * (2 if name in personal else 1) for name, size in sizes.items())


def upper_bound(growth: int) -> float:
    """The largest growth that a measurement may show if `growth` is predicted."""
    return growth * (1 + RELATIVE_ERROR)
