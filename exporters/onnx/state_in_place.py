"""Lets a training step write new weights and optimizer state over the old values.

The memory of an old value may be overwritten only when all nodes that read this value have run.
This is certain only if the node that computes the new value depends on all these nodes. A weight's
gradient depends on most readers of the weight, but not on the node that uses the weight to compute
the gradient for earlier layers. This module adds the missing dependencies.
"""

import math
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from device_agent.formats.manifest import Port
from exporters.memory.liveness import VIEWS, reads
from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import DTYPES

LEAST_BYTES = 2**16
"""Smaller state is overwritten only if this needs no further nodes: four nodes and their time cost
more than the memory."""
ELEMENTWISE = {"Add", "Sub", "Mul", "Div"}
"""Operators that read an element before they write the same element."""
SAME_MEMORY = VIEWS | {"Transpose", "Cast", "Slice", "Expand", "Dropout", "Concat", "Split"}
"""Operators whose output may be the memory of their input, in a runtime that optimizes."""


def update_in_place(model: ir.Model, signature: ProgramSignature) -> list[str]:
    """Order the nodes of `model` so that new state can overwrite old state.

    Args:
        model: The graph of `signature`, which is changed.
        signature: The signature. Its ports define which output replaces which input.

    Returns:
        The names of the outputs that may now be written over the input with the same state. If a
        node may need the old value after the new value is written, the output is left out.
    """
    graph = model.graph
    values = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    old = {port.state: values[port.name] for port in signature.inputs if port.state is not None}
    order = Order(graph)
    overwritten = []
    for port in signature.outputs:
        if port.state in old:
            late = order.late_readers(old[port.state], values[port.name])
            if late is None or (late and byte_size(port) < LEAST_BYTES):
                continue
            if not late or order.run_after(values[port.name], late):
                overwritten.append(port.name)
    labels = [values[port.name] for port in signature.inputs if port.kind == "labels"]
    order.finish_layer_by_layer(
        [values[port.name] for port in signature.outputs if port.state in old], labels
    )
    return overwritten


def byte_size(port: Port) -> int:
    """The size of the state of `port`, in bytes."""
    return math.prod(size for size in port.shape if size) * DTYPES[port.dtype].itemsize


class Order:
    """The order in which the nodes of a graph must run, given by the values that the nodes read."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.readers: dict[ir.Value, list[ir.Node]] = {}
        self.number = {node: number for number, node in enumerate(graph)}
        # Bit n of an entry says whether node n must have run. This takes one operation per edge;
        # sets would take one per pair of nodes.
        self.needed: dict[ir.Node, int] = {}
        for node, number in self.number.items():
            bits = 1 << number
            for value in set(reads(node)):
                self.readers.setdefault(value, []).append(node)
                if (producer := value.producer()) in self.number:
                    bits |= self.needed[producer]
            self.needed[node] = bits
        self.flat, self.start = (constant(value) for value in ([-1], 0))

    def needs(self, node: ir.Node, other: ir.Node) -> bool:
        """Whether `node` is `other` or runs after it."""
        return bool(self.needed[node] >> self.number[other] & 1)

    def finish_layer_by_layer(
        self, results: Sequence[ir.Value], labels: Sequence[ir.Value]
    ) -> None:
        """Let the nodes that compute `results` run as soon as their gradients are known.

        ONNX Runtime starts with the last node in the file whose result no node reads, and first
        runs all nodes on which this node depends. The gradients of the last layers are known first,
        so the updates of these layers must be last in the file. Otherwise large tensors stay in
        memory until small biases are updated. For each update, this method counts the gradients
        that other updates also need. The larger this number, the later the update runs. Gradients
        are the values that depend on `labels`.
        """
        first = sum(1 << self.number[node] for v in labels for node in set(self.readers.get(v, ())))
        gradients = sum(1 << self.number[n] for n, needed in self.needed.items() if needed & first)
        makers = (value.producer() for value in results if not value.uses())
        needed = {n: self.needed[n] & gradients for n in makers if n is not None}
        once = shared = 0
        for bits in needed.values():
            once, shared = once | bits, shared | (once & bits)
        ends = [node for node, bits in needed.items() if bits]
        ends.sort(key=lambda node: -(needed[node] & shared).bit_count())
        for node in ends:
            self.graph.remove(node)
        self.graph.extend(ends)

    def late_readers(self, old: ir.Value, new: ir.Value) -> list[ir.Node] | None:
        """Nodes that read the memory of `old` and may run after the node that computes `new`.

        Returns None if `new` cannot be written over `old`.
        """
        end = new.producer()
        if end is None or new.shape != old.shape or new.dtype != old.dtype:
            return None
        late = []
        for node, value in self.uses(old):
            if node is end:
                if value.shape != new.shape or not writes_over(node, value):
                    return None
            elif self.needs(node, end):
                return None
            elif node.op_type in SAME_MEMORY:
                # The nodes that read its results run after it, and are checked as well.
                if any(not self.readers.get(value) for value in node.outputs):
                    return None
            elif not self.needs(end, node):
                late.append(node)
        return late

    def uses(self, value: ir.Value) -> Iterator[tuple[ir.Node, ir.Value]]:
        """Yield the nodes that read the memory of `value`, with the value that they read."""
        for node in self.readers.get(value, ()):
            yield node, value
            if node.op_type in SAME_MEMORY:
                for result in node.outputs:
                    yield from self.uses(result)

    def run_after(self, new: ir.Value, late: Sequence[ir.Node]) -> bool:
        """Make the node that computes `new` depend on the nodes `late`. False if impossible."""
        end = new.producer()
        assert end is not None
        index = next((n for n, v in enumerate(end.inputs) if is_like(v, new)), None)
        if index is None or new.shape is None or self.readers.get(new):
            return False
        shape = constant(list(new.shape.numpy()))
        added = [shape] if self.flat.graph is not None else [self.flat, self.start, shape]
        chosen = shape.outputs[0]
        for node in late:
            flat = ir.node("Reshape", [node.outputs[0], self.flat.outputs[0]])
            start = ir.node("Gather", [flat.outputs[0], self.start.outputs[0]], {"axis": 0})
            choice = ir.node("Cast", start.outputs, {"to": ir.DataType.BOOL})
            same = ir.node("Where", [choice.outputs[0], chosen, chosen])
            added += [flat, start, choice, same]
            chosen = same.outputs[0]
        old = end.inputs[index]
        view = ir.node("Reshape", [old, chosen])
        view.outputs[0].shape, view.outputs[0].type = new.shape, new.type
        end.replace_input_with(index, view.outputs[0])
        # The node moves to the end of the file, because it now reads results of later nodes.
        self.graph.remove(end)
        self.graph.extend([*added, view, end])
        return True


def know_shapes(graph: ir.Graph) -> None:
    """Set the shapes of values that `Order.run_after` reshaped, because onnx cannot infer them."""
    for node in graph:
        if node.op_type != "Reshape":
            continue
        shape = node.inputs[1]
        while shape and (choice := shape.producer()) and choice.op_type == "Where":
            shape = choice.inputs[1]
        if shape is None or shape is node.inputs[1]:
            continue
        sizes = ir.convenience.get_const_tensor(shape)
        if sizes is not None:
            node.outputs[0].shape = ir.Shape(sizes.numpy().tolist())


def writes_over(node: ir.Node, value: ir.Value) -> bool:
    """Whether `node` may write its result over `value`, one of its inputs of the same shape.

    A Gemm may overwrite only its summand, because ONNX Runtime copies the summand to the result
    before it multiplies.
    """
    if node.op_type == "Gemm":
        return value not in node.inputs[:2]
    return node.op_type in ELEMENTWISE


def constant(value: int | list[int]) -> ir.Node:
    """Create a node whose result is the constant `value`."""
    return ir.node("Constant", [], {"value": ir.tensor(value, ir.DataType.INT64)})


def is_like(value: ir.Value | None, other: ir.Value) -> bool:
    """Whether `value` has the shape and type of `other`."""
    return value is not None and value.shape == other.shape and value.dtype == other.dtype
