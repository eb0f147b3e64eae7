"""Lists the operations of an ONNX graph with known shapes for the cost model."""

from collections import Counter
from collections.abc import Iterator

from onnx_ir import Graph, Node

from exporters.memory.liveness import bodies, execution_order, is_view
from exporters.memory.static_shapes import shape_of
from profiles.cost_model.workload import (
    FREE,
    LOOP,
    PRODUCTS,
    Operation,
    amount,
    blocked_kind,
    kind_of,
    sizes_of,
)

PASS = 8
"""Reading one element takes about as long as this many multiply-accumulates, on the processors that
were measured."""

Sized = tuple[str, tuple[int, ...]]
"""A kind of operation with its sizes."""


def operations(graph: Graph) -> tuple[Operation, ...]:
    """Return the operations of `graph`, in order. Equal operations are one entry with a count."""
    counts = Counter(work for node in execution_order(graph) for work in of_node(node))
    return tuple(Operation(kind, sizes, n) for (kind, sizes), n in counts.items())


def effort(node: Node) -> int:
    """Estimate the time of `node`, in multiply-accumulates.

    Use the estimate only to compare nodes.
    """
    return sum(
        amount(kind, sizes) * (1 if kind in PRODUCTS else PASS)
        for kind, sizes in of_node(node)
        if kind not in (FREE, LOOP)
    )


def of_node(node: Node) -> Iterator[Sized]:
    """Yield the operation of `node`, or all operations that a loop runs, in order of execution."""
    steps = loop_steps(node)
    if steps is not None:
        yield LOOP, (steps,)
        for body in bodies(node):
            inside = [work for inner in execution_order(body) for work in of_node(inner)]
            yield from [work for work in inside for _ in range(steps)]
        return
    inputs = [shape_of(value) for value in node.inputs if value is not None]
    outputs = [shape_of(value) for value in node.outputs[:1]]
    # A transposition that is fused into a product costs nothing.
    if node.domain:
        kind = blocked_kind(node.op_type, inputs[1] if len(inputs) > 1 else ())
    else:
        kind = FREE if is_view(node) else kind_of(node.op_type, inputs, outputs)
    yield kind, (1,) if kind == FREE else sizes_of(kind, inputs, outputs)


def loop_steps(node: Node) -> int | None:
    """How often a loop runs its body. None for other operators."""
    if node.op_type != "Scan":
        return None
    scanned = node.attributes["num_scan_inputs"].as_int()
    return int(shape_of(node.inputs[-scanned])[0])
