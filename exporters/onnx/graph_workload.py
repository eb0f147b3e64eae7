"""Computes the work and memory of a run from an ONNX graph, for the planner's predictions."""

import math
from collections import Counter
from collections.abc import Iterator

import msgspec
import onnx
from onnx_ir import Graph, Node

from device_agent.formats.blocked_graphs import BLOCKS
from exporters.memory.liveness import bodies, execution_order, is_view, model_liveness
from exporters.memory.onnx_arena import arena_bytes
from exporters.memory.static_shapes import at_batch, shape_of
from exporters.onnx.blocked_layout import blocked, blocked_footprint
from exporters.onnx.onnx_writer import to_onnx
from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import DTYPES
from profiles.cost_model.workload import FREE, LOOP, Operation, SignatureWork, kind_of, sizes_of


def signature_work(
    signature: ProgramSignature, batch: int, times: int = 1, graph: bytes | None = None
) -> SignatureWork:
    """The work of a run of `signature`, computed from its ONNX graph.

    Args:
        signature: Of a program.
        batch: Number of samples.
        times: How often a step of the schedule runs it.
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
    form = blocked(data, BLOCKS[0]) if signature.trains else None
    if form is None:
        return work
    # Devices with blocked convolutions need more memory. All devices are planned for as if they
    # had them.
    arena = blocked_footprint(data, BLOCKS[0], batch).arena
    nodes = len(onnx.load_from_string(form).graph.node)
    return msgspec.structs.replace(work, arena=max(work.arena, arena), nodes=nodes)


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
    found = Counter(of_graph(model.graph))
    return SignatureWork(
        name=name,
        times=times,
        operations=tuple(Operation(kind, sizes, n) for (kind, sizes), n in found.items()),
        nodes=len(whole.node),
        ports=len(whole.input) + len(whole.output),
        state=state,
        inputs=alive.inputs,
        outputs=alive.outputs,
        arena=arena_bytes(buffer for buffer in alive.buffers if buffer.name not in results),
    )


def of_graph(graph: Graph) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The kind and sizes of every operation in `graph`, in order of execution."""
    for node in execution_order(graph):
        steps = loop_steps(node)
        if steps is not None:
            yield LOOP, (steps,)
            for body in bodies(node):
                yield from [work for work in of_graph(body) for _ in range(steps)]
        else:
            inputs = [shape_of(value) for value in node.inputs if value is not None]
            outputs = [shape_of(value) for value in node.outputs[:1]]
            # A transposition that is fused into a product costs nothing.
            kind = FREE if is_view(node) else kind_of(node.op_type, inputs, outputs)
            yield kind, (1,) if kind == FREE else sizes_of(kind, inputs, outputs)


def loop_steps(node: Node) -> int | None:
    """How often a loop runs its body; None for other operators."""
    if node.op_type != "Scan":
        return None
    scanned = node.attributes["num_scan_inputs"].as_int()
    return int(shape_of(node.inputs[-scanned])[0])
