"""Computes the work and memory of a run from an ONNX graph, for the planner's predictions."""

import math
from collections.abc import Callable
from functools import partial

import msgspec
import onnx
from onnx_ir import Model

from device_agent.formats.graph_forms import BLOCKS
from exporters.memory.liveness import model_liveness
from exporters.memory.onnx_arena import arena_bytes
from exporters.memory.static_shapes import at_batch
from exporters.onnx.forms import blocked_layout, winograd
from exporters.onnx.graph_operations import operations
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import DTYPES
from profiles.cost_model.workload import FormWork, SignatureWork


def signature_work(
    signature: ProgramSignature, batch: int, times: int = 1, graph: bytes | None = None
) -> SignatureWork:
    """The work of a run of `signature`, computed from its ONNX graph.

    Args:
        signature: A signature of a program.
        batch: Number of samples.
        times: How often a step of the schedule runs the signature.
        graph: The signature's serialized graph, if it was exported before.

    Raises:
        ExportError: The signature cannot be exported, or a tensor's size does not follow from the
            batch.
    """
    state = sum(
        math.prod(size for size in port.shape if size) * DTYPES[port.dtype].itemsize
        for port in signature.inputs
        if port.kind == "state"
    )
    data = graph or to_onnx(signature)
    work = graph_work(data, batch, signature.name, state, times)
    return with_forms(work, data, batch) if signature.trains else work


def with_forms(work: SignatureWork, graph: bytes, batch: int) -> SignatureWork:
    """Add to `work` the work of the blocked and Winograd forms of its `graph`."""
    blocked = form_work(graph, batch, partial(blocked_layout.rewrite, block=BLOCKS[0], batch=batch))
    if blocked is not None:
        work = msgspec.structs.replace(
            work,
            blocked=blocked.operations,
            arena=max(work.arena, blocked.arena),
            nodes=max(work.nodes, blocked.nodes),
        )
    return msgspec.structs.replace(work, winograd=form_work(graph, batch, winograd.rewrite))


def form_work(graph: bytes, batch: int, rewrite: Callable[[Model], bool]) -> FormWork | None:
    """The work of `graph` after `rewrite` changed it; None if `rewrite` changes nothing."""
    whole = onnx.load_from_string(graph)
    model = at_batch(whole, batch)
    folded = len(whole.graph.node) - len(model.graph)
    if not rewrite(model):
        return None
    results = {value.name for value in model.graph.outputs}
    buffers = model_liveness(model).buffers
    arena = arena_bytes(buffer for buffer in buffers if buffer.name not in results)
    return FormWork(
        operations=operations(model.graph), nodes=folded + len(model.graph), arena=arena
    )


def graph_work(
    graph: bytes, batch: int, name: str = "", state: int = 0, times: int = 1
) -> SignatureWork:
    """The work of one run of a serialized `graph` on `batch` samples.

    Equal operations are counted together. Operations inside a loop count once per step. Raises
    ExportError if a tensor's size does not follow from the batch.
    """
    whole = onnx.load_from_string(graph).graph
    model = at_batch(onnx.load_from_string(graph), batch)
    alive = model_liveness(model)
    # The agent provides the memory of outputs, so they are not in the arena.
    results = {value.name for value in whole.output}
    return SignatureWork(
        name=name,
        times=times,
        operations=operations(model.graph),
        nodes=len(whole.node),
        ports=len(whole.input) + len(whole.output),
        state=state,
        inputs=alive.inputs,
        outputs=alive.outputs,
        arena=arena_bytes(buffer for buffer in alive.buffers if buffer.name not in results),
    )
