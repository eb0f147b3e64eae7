"""The forward pass of a training step, and copies of its nodes for the backward pass."""

import math
from collections.abc import Collection
from functools import cached_property

import onnx_ir as ir

from exporters.memory.liveness import bodies, is_view, reads
from exporters.memory.onnx_footprint import SizedGraph
from exporters.memory.static_shapes import size_of
from exporters.onnx.graph_operations import effort
from profiles.errors import ExportError

SMALL = 64
"""A value is always kept if its size times this is at most the size of the largest value."""
REPEATED = "_repeated"
"""The suffix of the names of second copies."""


class ForwardPass:
    """The nodes of a graph on which its outputs `metrics` depend, in the order of the file.

    Sizes are in bytes. Reading them raises ExportError if a shape of the graph is not known.
    """

    def __init__(self, graph: ir.Graph, metrics: Collection[str]) -> None:
        ends = {value.producer() for value in graph.outputs if value.name in metrics}
        for node in reversed(graph):
            if node in ends:
                ends.update(value.producer() for value in reads(node))
        self.nodes = [node for node in graph if node in ends]
        self.position = {node: number for number, node in enumerate(self.nodes)}
        self.values = [value for node in self.nodes for value in node.outputs]
        # Constants cost no memory, and the body of a loop cannot belong to two nodes.
        once = [n for n in self.nodes if n.op_type == "Constant" or any(True for _ in bodies(n))]
        self.fixed = {*graph.outputs, *(value for node in once for value in node.outputs)}

    def producer_of(self, value: ir.Value) -> ir.Node:
        """The node of the forward pass that computes `value`."""
        node = value.producer()
        assert node is not None
        return node

    def read_later(self, value: ir.Value) -> bool:
        """Whether a node behind the forward pass reads `value`."""
        return any(node not in self.position for node in value.consumers())

    def last_reader(self, value: ir.Value) -> int:
        """Index of the last node of the forward pass that reads `value`. -1 if there is none."""
        numbers = (self.position.get(node, -1) for node in value.consumers())
        return max(numbers, default=-1)

    def kept_bytes(self, batch: int) -> int:
        """The size of the values that the backward pass reads. Each unknown size is set to `batch`.

        Values of unknown rank do not count.
        """
        return sum(
            math.prod(size if isinstance(size, int) else batch for size in value.shape)
            * math.ceil(value.dtype.itemsize)
            for value in self.values
            if value.shape is not None and value.dtype is not None and self.read_later(value)
        )

    @cached_property
    def sizes(self) -> dict[ir.Value, int]:
        """The size of each value."""
        return {value: size_of(value) for value in self.values}

    @cached_property
    def small(self) -> set[ir.Value]:
        """Values that take little memory; see `SMALL`."""
        largest = max(self.sizes.values(), default=0)
        return {value for value, size in self.sizes.items() if size * SMALL <= largest}

    @cached_property
    def always_kept(self) -> set[ir.Value]:
        """Values that are never computed again."""
        return self.small | self.fixed

    @cached_property
    def efforts(self) -> dict[ir.Node, int]:
        """The work of each node; see `effort`."""
        return {node: effort(node) for node in self.nodes}

    def holder(self, value: ir.Value) -> ir.Value:
        """Return the value that owns the memory of `value`.

        The owner is `value` itself, unless it is a view of another value.
        """
        while value in self.sizes and is_view(node := self.producer_of(value)):
            source = node.inputs[0]
            if source is None or source not in self.sizes:
                break
            value = source
        return value


def repeat(forward: ForwardPass, names: Collection[str]) -> None:
    """Add a second copy of each value in `names`. Nodes after the forward pass read the copies."""
    copies: dict[ir.Value, ir.Value] = {}
    twins = set()
    for node in forward.nodes:
        if not any(value.name in names for value in node.outputs):
            continue
        copy = ir.Node(
            node.domain,
            node.op_type,
            [copies.get(value, value) if value is not None else None for value in node.inputs],
            node.attributes.values(),
            num_outputs=len(node.outputs),
            name=f"node_{node.outputs[0].name}{REPEATED}",
        )
        twins.add(copy)
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.shape, new.type = f"{old.name}{REPEATED}", old.shape, old.type
            if old.name in names:
                copies[old] = new
        node.append(copy)
    for old, new in copies.items():
        for use in list(old.uses()):
            if use.node not in forward.position and use.node not in twins:
                use.node.replace_input_with(use.idx, new)


def repeated_share(sized: SizedGraph) -> float | None:
    """The share of the work of an ONNX graph that is done a second time.

    The share is the work of the nodes that `repeat` added, divided by the work of all other nodes.
    Returns None if sizes depend on the data.
    """
    if REPEATED.encode() not in sized.graph:
        return 0.0
    try:
        efforts = {node: effort(node) for node in sized.model().graph}
    except ExportError:
        return None
    again = sum(work for node, work in efforts.items() if (node.name or "").endswith(REPEATED))
    return again / (sum(efforts.values()) - again)
