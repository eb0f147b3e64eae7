"""Computes the work and memory of a run from an ONNX graph, for the planner's predictions."""

import math
from collections.abc import Callable
from functools import partial

import msgspec
from onnx_ir import Model

from device_agent.formats.graph_forms import BLOCKS
from exporters.memory.liveness import model_liveness
from exporters.memory.onnx_arena import arena_bytes
from exporters.memory.onnx_footprint import SizedGraph
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
        ExportError: The signature cannot be exported, or a tensor's size cannot be computed from
            the batch size.
    """
    state = sum(
        math.prod(size for size in port.shape if size) * DTYPES[port.dtype].itemsize
        for port in signature.inputs
        if port.kind in ("state", "gradient")
    )
    sized = SizedGraph(graph or to_onnx(signature), batch)
    work = graph_work(sized, signature.name, state, times)
    return with_forms(work, sized) if signature.trains else work


def with_forms(work: SignatureWork, sized: SizedGraph) -> SignatureWork:
    """Add to `work` the work of the blocked and Winograd forms of its graph."""
    rewrite = partial(blocked_layout.rewrite, block=BLOCKS[0], batch=sized.batch)
    blocked = form_work(sized, rewrite)
    if blocked is not None:
        work = msgspec.structs.replace(
            work,
            blocked=blocked.operations,
            arena=max(work.arena, blocked.arena),
            nodes=max(work.nodes, blocked.nodes),
        )
    return msgspec.structs.replace(work, winograd=form_work(sized, winograd.rewrite))


def form_work(sized: SizedGraph, rewrite: Callable[[Model], bool]) -> FormWork | None:
    """The work of a graph after `rewrite` changed it; None if `rewrite` changes nothing."""
    model = sized.model()
    if not rewrite(model):
        return None
    results = {value.name for value in model.graph.outputs}
    buffers = model_liveness(model).buffers
    arena = arena_bytes(buffer for buffer in buffers if buffer.name not in results)
    return FormWork(
        operations=operations(model.graph), nodes=sized.folded + len(model.graph), arena=arena
    )


def graph_work(sized: SizedGraph, name: str = "", state: int = 0, times: int = 1) -> SignatureWork:
    """The work of one run of a graph on a batch of its size.

    Equal operations are counted together. Operations inside a loop count once for each step. Raises
    ExportError if a tensor's size cannot be computed from the batch size.
    """
    whole, model = sized.opened.graph, sized.model()
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
