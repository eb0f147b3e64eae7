"""Keeps few values of the forward pass; the backward pass computes the others again.

The forward pass is cut into segments, as in Chen et al., "Training deep nets with sublinear memory
cost" (2016, https://arxiv.org/abs/1604.06174). The values that cross a cut are its checkpoints.
When the backward pass reaches a segment, the segment runs again from the checkpoints before it. The
last segment runs once, because the backward pass begins with it.
"""

from collections.abc import Collection
from functools import cached_property
from itertools import accumulate

import onnx_ir as ir
from onnx import ModelProto
from onnx_ir.passes import InPlacePass, PassResult

from exporters.memory.liveness import bodies, graph_liveness, reads
from exporters.memory.static_shapes import at_batch, size_of, without_waits
from exporters.onnx.recomputation import RecomputeActivations
from exporters.onnx.scan_loops import separate_outputs
from exporters.onnx.state_in_place import update_in_place
from exporters.programs.program import ProgramSignature
from profiles.cost_model.memory_rule import ONNX
from profiles.errors import ExportError

SMALL = 64
"""A value is always kept if this many of its size are at most as large as the largest value."""
PARTS = 32
"""Budgets are such parts of the memory of everything that the backward pass reads."""
TRIALS = 8
"""How many ways to cut the forward pass are tried, from the smallest budget on."""
ENOUGH = 1.02
"""A peak is as good as the smallest one if it is at most this many times as large."""

Cuts = tuple[int, ...]
"""Ascending places in the forward pass: a cut at place n is before the node n."""


class KeepCheckpoints(InPlacePass):
    """Repeats segments of the forward pass so that few values stay alive until the backward pass.

    Before: each value is computed once.

    After: nodes behind the forward pass read second copies of all values except checkpoints, small
    values and those of the last segment. The copies' nodes follow the first ones in the file. ONNX
    Runtime visits the last inputs of a node first, so it runs a segment again only when a gradient
    has reached it. The numbers are the same, because the copies compute the same from the same
    values.

    The segments are those with the smallest peak for a batch of `signature.recompute` samples:
    planned tensors (`exporters/memory/liveness.py`) and what a session takes for its nodes. If none
    has a smaller peak than the graph has without them, or if a size is not known, the graph stays
    as it is.
    """

    def __init__(self, signature: ProgramSignature) -> None:
        """Take the signature of the graph, a training step."""
        super().__init__()
        self.signature = signature

    def call(self, model: ir.Model) -> PassResult:
        """Let the nodes behind the forward pass of `model` read copies."""
        try:
            names = Search(ir.to_proto(model), self.signature).best()
        except ExportError:  # a size depends on the data
            names = frozenset()
        repeat(ForwardPass(model.graph, metrics_of(self.signature)), names)
        return PassResult(model, bool(names))


def metrics_of(signature: ProgramSignature) -> list[str]:
    """The outputs that end the forward pass of a training step, by name."""
    return [port.name for port in signature.outputs if port.kind == "metric"]


class ForwardPass:
    """The nodes of a graph that its outputs `metrics` depend on, in the order of the file."""

    def __init__(self, graph: ir.Graph, metrics: Collection[str]) -> None:
        ends = {value.producer() for value in graph.outputs if value.name in metrics}
        for node in reversed(graph):
            if node in ends:
                ends.update(value.producer() for value in reads(node))
        self.nodes = [node for node in graph if node in ends]
        self.place = {node: number for number, node in enumerate(self.nodes)}
        self.values = [value for node in self.nodes for value in node.outputs]
        # Constants cost nothing, and the body of a loop cannot be in two nodes.
        once = [n for n in self.nodes if n.op_type == "Constant" or any(True for _ in bodies(n))]
        self.fixed = {*graph.outputs, *(value for node in once for value in node.outputs)}

    def made_by(self, value: ir.Value) -> ir.Node:
        """The node of the forward pass that makes `value`."""
        node = value.producer()
        assert node is not None
        return node

    def read_later(self, value: ir.Value) -> bool:
        """Whether a node behind the forward pass reads `value`."""
        return any(node not in self.place for node in value.consumers())

    def last_reader(self, value: ir.Value) -> int:
        """The place of the last node of the forward pass that reads `value`; -1 if none does."""
        places = (self.place.get(node, -1) for node in value.consumers())
        return max(places, default=-1)


def repeat(forward: ForwardPass, names: Collection[str]) -> None:
    """Let nodes behind `forward` read second copies of the values called `names`."""
    copies: dict[ir.Value, ir.Value] = {}
    made = set()
    for node in forward.nodes:
        if not any(value.name in names for value in node.outputs):
            continue
        copy = ir.Node(
            node.domain,
            node.op_type,
            [copies.get(value, value) if value is not None else None for value in node.inputs],
            node.attributes.values(),
            num_outputs=len(node.outputs),
            name=f"node_{node.outputs[0].name}_repeated",
        )
        made.add(copy)
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.shape, new.type = f"{old.name}_repeated", old.shape, old.type
            if old.name in names:
                copies[old] = new
        node.append(copy)
    for old, new in copies.items():
        for use in list(old.uses()):
            if use.node not in forward.place and use.node not in made:
                use.node.replace_input_with(use.idx, new)


class Search:
    """The search for the values of a training step to compute twice."""

    def __init__(self, model: ModelProto, signature: ProgramSignature) -> None:
        """Take the graph of `signature`.

        Raises ExportError if the size of a value does not follow from the batch.
        """
        self.signature, self.metrics = signature, metrics_of(signature)
        sized = at_batch(model, signature.recompute)
        separate_outputs(sized.graph, [port.name for port in signature.outputs])
        self.sized = ir.to_proto(sized)  # each trial changes a copy
        self.forward = ForwardPass(ir.from_proto(self.sized).graph, self.metrics)
        self.sizes = {value: size_of(value) for value in self.forward.values}
        largest = max(self.sizes.values(), default=0)
        self.small = {value for value, size in self.sizes.items() if size * SMALL <= largest}

    def best(self) -> frozenset[str]:
        """Names of the values to compute twice; empty if that saves nothing.

        Among peaks that are nearly the smallest, the one counts for which the least is repeated.
        """
        trials = {names: self.peak(names) for names in map(self.repeated, self.segmentations())}
        trials[frozenset()] = self.peak(())
        limit = ENOUGH * min(trials.values())
        fitting = [names for names, peak in trials.items() if peak <= limit]
        return min(fitting, key=lambda names: (self.cost(names), sorted(names)))

    def peak(self, names: Collection[str]) -> int:
        """Bytes of planned tensors and nodes, without inputs, if `names` are computed twice."""
        model = ir.from_proto(self.sized)
        repeat(ForwardPass(model.graph, self.metrics), names)
        for metric in self.metrics:
            RecomputeActivations(metric)(model)
        overwritten = update_in_place(model, self.signature)
        nodes = ONNX.node_bytes * len(model.graph)
        return nodes + graph_liveness(without_waits(model).graph, overwritten).planned

    def cost(self, names: Collection[str]) -> int:
        """Bytes that are written a second time."""
        return sum(size for value, size in self.sizes.items() if value.name in names)

    def repeated(self, cuts: Cuts) -> frozenset[str]:
        """Names of the values to compute twice with these `cuts`."""
        forward, place = self.forward, self.forward.place
        kept = self.small | forward.fixed
        for value in forward.values:
            made, last = place[forward.made_by(value)], forward.last_reader(value)
            if made >= cuts[-1] or any(made < cut <= last for cut in cuts):
                kept.add(value)
        found = {value for value in forward.values if forward.read_later(value)} - kept
        for node in reversed(forward.nodes):
            if not found.isdisjoint(node.outputs):
                found.update(v for v in reads(node) if v in self.sizes and v not in kept)
        return frozenset(value.name or "" for value in found)

    def segmentations(self) -> list[Cuts]:
        """Different cuts, those for the smallest budgets.

        When the backward pass reaches a segment, all checkpoints before it are alive, and all that
        the backward pass needs of it. The cuts for a budget leave this below the budget
        everywhere, with as few bytes of checkpoints as possible.
        """
        found = (self.within(self.needed[-1] * part / PARTS) for part in range(1, PARTS))
        different = dict.fromkeys(cuts for cuts in found if cuts)
        return list(different)[:TRIALS]

    def within(self, budget: float) -> Cuts:
        """The cuts with the fewest bytes of checkpoints in this budget; empty if there are none."""
        held: dict[int, int] = {0: 0}  # bytes of all checkpoints up to a cut; the start counts too
        before: dict[int, int] = {}
        end = len(self.forward.nodes)
        for cut in (*self.narrow, end):
            ways = []
            for start in reversed(held):
                inside = self.needed[cut] - self.needed[start]
                if inside > budget:
                    break  # still earlier starts need more
                if held[start] + inside <= budget:
                    ways.append((held[start], start))
            if ways:
                least, before[cut] = min(ways)
                held[cut] = least + self.widths[cut]
        cuts, cut = [], before.get(end, 0)
        while cut:
            cuts.append(cut)
            cut = before[cut]
        return tuple(reversed(cuts))

    @cached_property
    def narrow(self) -> list[int]:
        """Places that fewer bytes cross than the places beside them, or as many."""
        places = range(1, len(self.forward.nodes))
        widths = self.widths
        return [n for n in places if widths[n - 1] >= widths[n] <= widths[n + 1]]

    @cached_property
    def widths(self) -> list[int]:
        """Bytes that nodes from each place on read from nodes before it."""
        change = [0] * (len(self.forward.nodes) + 1)
        for value, size in self.sizes.items():
            made, last = (
                self.forward.place[self.forward.made_by(value)],
                self.forward.last_reader(value),
            )
            if made < last:
                change[made + 1] += size
                change[last + 1] -= size
        return list(accumulate(change))

    @cached_property
    def needed(self) -> list[int]:
        """Bytes made before each place that the backward pass reads, without small values."""
        sizes = [0] * (len(self.forward.nodes) + 1)
        for value, size in self.sizes.items():
            if value not in self.small and self.forward.read_later(value):
                sizes[self.forward.place[self.forward.made_by(value)] + 1] += size
        return list(accumulate(sizes))
