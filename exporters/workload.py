"""The operations that one run of an ONNX graph consists of, for the planner's predictions."""

from collections import Counter
from collections.abc import Iterator

import onnx
from onnx_ir import Graph, Node

from exporters.liveness import at_batch, bodies, execution_order, shape_of
from profiles.workload import FREE, LOOP, Operation, kind_of, sizes_of


def operations(graph: bytes, batch: int) -> tuple[Operation, ...]:
    """Operations of one run of a serialized graph on `batch` samples, equal ones counted.

    What stands inside a loop counts once for each step. Raises ExportError where a tensor's size
    does not follow from the batch.
    """
    model = at_batch(onnx.load_from_string(graph), batch)
    found = Counter(of_graph(model.graph))
    return tuple(Operation(kind, sizes, count) for (kind, sizes), count in found.items())


def of_graph(graph: Graph) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Kind and sizes of every operation in `graph`, in order of execution."""
    for node in execution_order(graph):
        steps = loop_steps(node)
        if steps is not None:
            yield LOOP, (steps,)
            for body in bodies(node):
                yield from [work for work in of_graph(body) for _ in range(steps)]
        else:
            inputs = [shape_of(value) for value in node.inputs if value is not None]
            outputs = [shape_of(value) for value in node.outputs[:1]]
            kind = kind_of(node.op_type, inputs, outputs)
            yield kind, (1,) if kind == FREE else sizes_of(kind, inputs, outputs)


def loop_steps(node: Node) -> int | None:
    """How often a loop goes through its body; None for other operators."""
    if node.op_type != "Scan":
        return None
    scanned = node.attributes["num_scan_inputs"].as_int()
    return int(shape_of(node.inputs[-scanned])[0])
