"""Cut points of a captured model, and cutting it there into two graphs.

A cut point is a place in the execution order after which exactly one value that depends on the
samples is needed. Recording that activation is enough to run the rest of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from exporters.programs.captured import Captured
from exporters.programs.dropout import DRAW
from exporters.programs.recorded_graph import (
    attributes_read,
    input_node,
    is_impure,
    module_of,
    output_node,
    writes_in_place,
)
from profiles.errors import ModelError
from toolkit.submodels.capacity import count_activations, count_elements, count_parameters


@dataclass(frozen=True)
class CutPoint:
    """A place after which only one activation is needed.

    Attributes:
        place: Index of the last operator before the cut, in the order of `operators_on_samples`.
        node: The operator whose value is needed.
        module: The first module with parameters after the cut. If the model reads a parameter
            outside of all modules first, the name of that parameter.
    """

    place: int
    node: Node
    module: str

    @property
    def recorded(self) -> int:
        """How many numbers are recorded for one sample."""
        return count_elements(self.node, 1)


aten = torch.ops.aten


def is_batch_size(graph: GraphModule, node: Node) -> bool:
    """Whether `node` is the batch size, which both sides of a cut know without a recording."""
    if node.target is not aten.sym_size.int:
        return False
    return bool(node.meta["val"] == input_node(graph).meta["val"].shape[0])


def operators_on_samples(graph: GraphModule) -> list[Node]:
    """The operators that depend on the samples, in order of execution."""
    start = input_node(graph)
    dependent = {start}
    ordered = []
    for node in graph.graph.nodes:
        # Both sides compute the batch size themselves, so that it never crosses a cut.
        if is_batch_size(graph, node):
            continue
        if node.op in ("call_function", "call_method") and dependent & set(node.all_input_nodes):
            dependent.add(node)
            ordered.append(node)
    return ordered


def find_cut_points(graph: GraphModule) -> list[CutPoint]:
    """All useful cut points from the input to the output, without the two ends.

    A cut point is useful if parameters are read on both sides and one float tensor crosses, with
    the batch as its first axis. If both sides read the same tensor, that tensor would be frozen and
    trained at once; such cut points are left out.
    """
    ordered = operators_on_samples(graph)
    place = {node: i for i, node in enumerate(ordered)}
    last_use = {
        node: max(
            (place.get(u, len(ordered)) for u in node.users if not is_batch_size(graph, u)),
            default=-1,
        )
        for node in (input_node(graph), *ordered)
    }
    uses = places_reading(graph)
    weighted = sorted({i for read in uses.values() for i in read})
    spans = [(min(read), max(read)) for read in uses.values()]
    found = []
    for i, node in enumerate(ordered[:-1]):
        # A value crosses the cut if it is computed before and used after it.
        crossing = [n for n, last in last_use.items() if last > i and place.get(n, -1) <= i]
        later = [w for w in weighted if w > i]
        # A tensor that is first read before the cut and last read after it is shared.
        shared = any(first <= i < last for first, last in spans)
        useful = later and weighted[0] <= i and is_recordable(graph, node) and not shared
        if crossing == [node] and useful:
            first = later[0]
            own = next(name for name, places in uses.items() if first in places)
            found.append(CutPoint(i, node, module_of(ordered[first]) or own))
    return found


def places_reading(graph: GraphModule) -> dict[str, list[int]]:
    """The places that read each tensor of the model, or a value computed from the tensor alone."""
    place = {node: i for i, node in enumerate(operators_on_samples(graph))}
    derived_from: dict[Node, set[str]] = {}
    uses: dict[str, list[int]] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            derived_from[node] = {str(node.target)}
            continue
        # A value computed from parameters alone, such as a transposed weight, counts as those
        # parameters: the cut must not separate its uses either.
        read = set().union(*(derived_from.get(source, ()) for source in node.all_input_nodes))
        if node in place:
            for name in read:
                uses.setdefault(name, []).append(place[node])
        else:
            derived_from[node] = read
    return uses


def is_recordable(graph: GraphModule, node: Node) -> bool:
    """Whether the value of `node` is one float tensor with the batch as its first axis."""
    value, batch = node.meta["val"], input_node(graph).meta["val"].shape[0]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() == 0:
        return False
    return isinstance(value.shape[0], torch.SymInt) and bool(value.shape[0] == batch)


def subgraph(graph: GraphModule, after: int, upto: int) -> GraphModule:
    """The operators after place `after`, up to and including place `upto`, as a graph of one input.

    `after` is -1 to start from the samples.
    """
    ordered = operators_on_samples(graph)
    source = input_node(graph) if after < 0 else ordered[after]
    skipped, wanted = set(ordered[: after + 1]), set(ordered[: upto + 1])
    part = Graph()
    copies = {source: part.placeholder("x")}
    copies[source].meta = dict(source.meta)
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output") or node in skipped or node is source:
            continue
        if is_batch_size(graph, node):
            # On this side of the cut the batch size is that of the recording.
            copies[node] = part.call_function(aten.sym_size.int, (copies[source], 0))
            copies[node].meta = dict(node.meta)
        elif node in wanted or node not in set(ordered):
            copies[node] = part.node_copy(node, lambda n: copies[n])
    part.output(copies[ordered[upto]])
    # Parameters are found by name in the original graph module.
    cut = GraphModule(graph, part)
    part.eliminate_dead_code(is_impure_node=is_impure)
    cut.recompile()
    return cut


SAME_VALUE = (aten.contiguous.default, aten.clone.default, aten.alias.default)
"""Operators whose result equals their input."""


def lasting_operators(graph: GraphModule) -> list[int]:
    """The places of the operators that run in training and in prediction alike.

    Copies that change no value may be in one of them only, and products with random masks, which
    drop whole branches, are in training only.
    """
    ordered = operators_on_samples(graph)
    masks = set(graph.graph.find_nodes(op="call_function", target=DRAW))
    for node in graph.graph.nodes:
        if node not in set(ordered) and masks & set(node.all_input_nodes):
            masks.add(node)
    return [
        place
        for place, node in enumerate(ordered)
        if node.target not in SAME_VALUE and not masks & set(node.all_input_nodes)
    ]


class Cutter:
    """Cuts the training and the inference graph of a captured model at the same places.

    A place is the index of an operator in the training graph.
    """

    def __init__(self, captured: Captured) -> None:
        """Raise ModelError if the model cannot be cut at all.

        Both graphs must have the same `lasting_operators`, no operator may write in place, and the
        last operator must compute the output.
        """
        self.captured = captured
        training, inference = (
            operators_on_samples(captured.training),
            operators_on_samples(captured.inference),
        )
        self.lasting = lasting_operators(captured.training)
        self.predicted = lasting_operators(captured.inference)
        targets = [training[i].target for i in self.lasting]
        if targets != [inference[i].target for i in self.predicted]:
            raise ModelError(
                "The model runs different operators in training and in prediction, so that a cut "
                "point of one graph is not a place in the other. It cannot be sliced; use another "
                "family.",
                code="model.cannot-slice",
            )
        writing = next((n for n in training if writes_in_place(n)), None)
        if writing is not None:
            raise ModelError(
                f"The model writes in place ({writing.target} in {module_of(writing)!r}), so that "
                "the values that cross a cut are unknown. It cannot be sliced; use the operator "
                "that returns a new tensor.",
                code="model.cannot-slice",
                operator=str(writing.target),
                module=module_of(writing),
            )
        # Otherwise the subgraph up to the last operator would not end in the output.
        if output_node(captured.training) is not training[-1]:
            raise ModelError(
                "The last operator of the model does not compute its output. It cannot be sliced; "
                "remove what follows the output.",
                code="model.cannot-slice",
            )
        self.end = len(training) - 1
        points = find_cut_points(captured.training)
        # After another operator the value is that of the point before it.
        self.points = [point for point in points if point.place in set(self.lasting)]

    def in_inference(self, place: int) -> int:
        """The place in the inference graph after which the same values are known."""
        count = sum(one <= place for one in self.lasting)
        return self.predicted[count - 1] if count else -1

    def trained(self, after: int) -> GraphModule:
        """The operators after place `after`, as they train."""
        return subgraph(self.captured.training, after, self.end)

    def predicting(self, after: int) -> GraphModule:
        """The operators after place `after`, as they predict."""
        return subgraph(self.captured.inference, self.in_inference(after), self.predicted[-1])

    def frozen(self, after: int, upto: int) -> GraphModule:
        """The operators between two places, as they predict."""
        after, upto = self.in_inference(after), self.in_inference(upto)
        return subgraph(self.captured.inference, after, upto)

    def load(self, part: GraphModule, batch: int) -> int:
        """Trained parameters plus activations of `part`, the numerator of its capacity."""
        return count_parameters(part, self.captured.parameters) + count_activations(part, batch)

    def stage_load(self, stage: GraphModule, batch: int) -> int:
        """All parameters, also frozen ones, plus activations of `stage`."""
        return count_parameters(stage, self.captured.frozen) + self.load(stage, batch)

    def stages(self, upto: int, limit: int, batch: int) -> list[GraphModule]:
        """The operators up to place `upto`, in as few stages as possible.

        Args:
            upto: Index of the last operator; -1 for no stages.
            limit: Most parameters plus activations of a stage. Operators between two neighbouring
                cut points cannot be separated, so that a stage may exceed it.
            batch: Samples in a batch.
        """
        if upto < 0:
            return []
        places = [*(point.place for point in self.points if point.place < upto), upto]
        bounds = [-1]
        for place, following in zip(places, [*places[1:], None], strict=True):
            end = place if following is None else following
            # Close the stage here if it would grow beyond the limit with the next stretch.
            if following is None or self.stage_load(self.frozen(bounds[-1], end), batch) > limit:
                bounds.append(place)
        return [self.frozen(a, b) for a, b in pairwise(bounds)]


def tensors_read(parts: Sequence[GraphModule]) -> list[str]:
    """Names of all tensors that `parts` read, each once."""
    return list(dict.fromkeys(name for part in parts for name in attributes_read(part)))
