"""Builds a graph with one input and one output from the operators between two positions.

If a single float tensor crosses a cut, and its first axis counts the samples, this tensor is
recorded unchanged. Otherwise the recording of a sample is one row (batch, k): all crossing tensors
one after the other. The part before the cut concatenates them, and the part after it splits the row
again. The numbers of the row represent token ids exactly.
"""

import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from device_agent.formats.manifest import RecordedDtype
from exporters.programs.recorded_graph import input_node
from exporters.programs.sample_ranges import PARTS, RANGE, range_of_row
from toolkit.cutting.graph_edit import GraphEditor
from toolkit.cutting.sample_flow import SampleFlow, shape_argument
from toolkit.submodels.capacity import count_elements

aten = torch.ops.aten
EXACT: dict[RecordedDtype, int] = {"float32": 2**24, "float16": 2**11}
"""A recording of this type holds all integers from 0 to this number."""


def is_row(flow: SampleFlow, nodes: Sequence[Node]) -> bool:
    """Whether the values of `nodes` are recorded as one row for each sample (see the module)."""
    # Samples and values that are not tensors are never recorded: they begin or end a part.
    (first, *others) = nodes
    value = first.meta["val"]
    alone = not others and (first.op == "placeholder" or not isinstance(value, Tensor))
    return not alone and (bool(others) or flow.sample_axis(first) != 0)


def make_subgraph(
    flow: SampleFlow,
    sources: Sequence[Node],
    targets: Sequence[Node],
    updates: Iterable[Node] = (),
    limit: int | None = None,
) -> GraphModule:
    """Build the graph of the operators that compute `targets` from `sources`.

    Args:
        flow: The recorded graph.
        sources: Activations that all paths to `targets` pass through; or only the samples.
        targets: Activations, or only the output.
        updates: Operators of the part that change tensors of the model.
        limit: The number of rows of the embedding, if token ids are among the sources.

    Returns:
        A graph that maps the recording of `sources` to the recording of `targets`.
    """
    builder = _Builder(flow, sources, limit)
    builder.copy([*targets, *updates])
    return builder.finish(targets)


class _Builder:
    """Copies a part of a graph. `copies` maps operators of the graph to operators of the part."""

    def __init__(self, flow: SampleFlow, sources: Sequence[Node], limit: int | None) -> None:
        self.flow, self.part, self.limit = flow, Graph(), limit
        self.input = self.part.placeholder("x")
        self.input.meta = dict(sources[0].meta)
        # Rows have the batch size of the model's input.
        self.edit = GraphEditor(self.part, input_node(flow.graph))
        self.sizes = dict[int, Node]()
        if is_row(flow, sources):
            self.copies = self.take_apart(sources)
        else:
            self.copies = {sources[0]: self.input}

    def take_apart(self, sources: Sequence[Node]) -> dict[Node, Node]:
        """Split the rows of a recording into the values of `sources`."""
        bounds = [0]
        for source in sources:
            bounds.append(bounds[-1] + count_elements(source, 1))
        self.input.meta["val"] = self.edit.empty_rows(bounds[-1])
        for key in (RANGE, PARTS):
            self.input.meta.pop(key, None)
        counts = [end - begin for begin, end in pairwise(bounds)]
        if row_range := range_of_row(list(zip(sources, counts, strict=True))):
            self.input.meta[RANGE] = row_range
        pieces = zip(sources, bounds, bounds[1:], strict=False)
        return {source: self.piece(source, begin, end) for source, begin, end in pieces}

    def piece(self, source: Node, begin: int, end: int) -> Node:
        """The value of `source`, taken from the columns `begin` to `end` of the rows."""
        axis, value = self.flow.sample_axis(source), source.meta["val"]
        assert axis is not None
        sizes = [int(size) for i, size in enumerate(value.shape) if i != axis]
        values = self.edit.add(aten.slice.Tensor, self.input, 1, begin, end)
        values = self.edit.add(aten.reshape.default, values, [-1, *sizes])
        if axis > 0:
            values = self.edit.add(aten.movedim.int, values, 0, axis)
        if value.is_floating_point():
            return values
        assert self.limit is not None
        values = self.edit.add(aten.to.dtype, values, value.dtype)
        # Verification feeds random recordings, which must also have valid ids.
        return self.edit.add(aten.clamp.default, values, 0, self.limit - 1)

    def copy(self, ends: list[Node]) -> None:
        """Copy `ends` and all operators that compute them from the sources."""
        wanted, pending = set(self.copies), list(ends)
        while pending:
            node = pending.pop()
            if node not in wanted:
                wanted.add(node)
                pending += self.flow.values_read(node)
        for node in self.flow.graph.graph.nodes:
            if node in wanted and node not in self.copies:
                self.copies[node] = self.copied(node)

    def copied(self, node: Node) -> Node:
        """Copy `node`. A multiple of the batch size is computed from the recording."""
        factor = self.flow.samples_times(node.meta.get("val"))
        if factor is not None:
            return self.batch_size(factor)
        shaped = shape_argument(node)
        if shaped is not None and node.args[shaped] not in self.copies:
            donor = node.args[shaped]
            assert isinstance(donor, Node)
            self.copies[donor] = self.of_same_shape(donor)
        copy = self.part.node_copy(node, lambda read: self.copies[read])
        # A recording is contiguous even if the original value was not, so a view may fail.
        if copy.target is aten.view.default:
            copy.target = aten.reshape.default
        return copy

    def batch_size(self, factor: int) -> Node:
        """The batch size times `factor`, computed from the recording."""
        if factor not in self.sizes:
            self.sizes[factor] = (
                self.part.call_function(aten.sym_size.int, (self.input, 0))
                if factor == 1
                else self.part.call_function(operator.mul, (self.batch_size(1), factor))
            )
            self.sizes[factor].meta["val"] = self.flow.batch * factor
        return self.sizes[factor]

    def of_same_shape(self, donor: Node) -> Node:
        """Zeros with shape and type of `donor`, which is on the other side of the cut."""
        value = donor.meta["val"]
        factors = [self.flow.samples_times(size) for size in value.shape]
        sizes = [
            int(size) if factor is None else self.batch_size(factor)
            for size, factor in zip(value.shape, factors, strict=True)
        ]
        same = value.dtype == self.input.meta["val"].dtype
        twin = self.part.call_function(
            aten.new_zeros.default, (self.input, sizes), {} if same else {"dtype": value.dtype}
        )
        twin.meta["val"] = value
        return twin

    def finish(self, targets: Sequence[Node]) -> GraphModule:
        """Let the part return the recording of `targets`, and return the part."""
        recording = self.copies[targets[0]]
        if is_row(self.flow, targets):
            recording = self.edit.add(aten.cat.default, [self.row(target) for target in targets], 1)
        self.part.output(recording)
        # Parameters are found by name in the original graph module.
        module = GraphModule(self.flow.graph, self.part)
        self.part.lint()
        return module

    def row(self, target: Node) -> Node:
        """The value of `target` as rows (batch, k) of float32."""
        values, axis = self.copies[target], self.flow.sample_axis(target)
        if axis:
            values = self.edit.add(aten.movedim.int, values, axis, 0)
        if not target.meta["val"].is_floating_point():
            values = self.edit.add(aten.to.dtype, values, torch.float32)
        return self.edit.add(aten.reshape.default, values, [-1, count_elements(target, 1)])
