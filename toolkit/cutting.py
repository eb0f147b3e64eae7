"""Places where a captured model can be cut in two, and the cutting itself.

A cut point is a place in the execution order where exactly one value that depends on the samples
is needed later: that activation is all that has to be recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from exporters.capture import Captured, attributes_read, input_node, output_node
from profiles.errors import ModelError
from toolkit.counting import activations, parameter_count


@dataclass(frozen=True)
class CutPoint:
    """The place behind the `place`-th operator: `node`'s value is the only one needed later.

    `module` is the first module with parameters behind it.
    """

    place: int
    node: Node
    module: str


def steps(graph: GraphModule) -> list[Node]:
    """The nodes that compute something from the samples, in order of execution."""
    start = input_node(graph)
    dependent = {start}
    ordered = []
    for node in graph.graph.nodes:
        if node.op in ("call_function", "call_method") and dependent & set(node.all_input_nodes):
            dependent.add(node)
            ordered.append(node)
    return ordered


def module_of(node: Node) -> str:
    """Path of the innermost module that `node` belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def cut_points(graph: GraphModule) -> list[CutPoint]:
    """All cut points from the input side to the output side, the ends excluded.

    Only those with parameters on both sides are of use; the rest are left out. So are those with
    one tensor read on both sides: it would be frozen and trained at once.
    """
    ordered = steps(graph)
    place = {node: i for i, node in enumerate(ordered)}
    last_use = {
        node: max((place.get(user, len(ordered)) for user in node.users), default=-1)
        for node in (input_node(graph), *ordered)
    }
    weighted = [i for i, node in enumerate(ordered) if reads_parameters(node)]
    spans = [(min(uses), max(uses)) for uses in tensor_uses(ordered).values()]
    found = []
    for i, node in enumerate(ordered[:-1]):
        crossing = [n for n, last in last_use.items() if last > i and place.get(n, -1) <= i]
        later = [w for w in weighted if w > i]
        shared = any(first <= i < last for first, last in spans)
        if crossing == [node] and later and weighted[0] <= i and not shared:
            found.append(CutPoint(i, node, module_of(ordered[later[0]])))
    return found


def tensor_uses(ordered: Sequence[Node]) -> dict[str, list[int]]:
    """Places at which each tensor of the model is read."""
    uses: dict[str, list[int]] = {}
    for i, node in enumerate(ordered):
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                uses.setdefault(str(source.target), []).append(i)
    return uses


def reads_parameters(node: Node) -> bool:
    """Whether `node` reads a tensor of the model."""
    return any(source.op == "get_attr" for source in node.all_input_nodes)


def subgraph(graph: GraphModule, after: int, upto: int) -> GraphModule:
    """Operators behind place `after` up to and including `upto`, as a graph of one input.

    Place -1 stands for the samples themselves.
    """
    ordered = steps(graph)
    source = input_node(graph) if after < 0 else ordered[after]
    skipped, wanted = set(ordered[: after + 1]), set(ordered[: upto + 1])
    part = Graph()
    copies = {source: part.placeholder("x")}
    copies[source].meta = dict(source.meta)
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output") or node in skipped or node is source:
            continue
        if node in wanted or node not in set(ordered):
            copies[node] = part.node_copy(node, lambda n: copies[n])
    part.output(copies[ordered[upto]])
    for node in reversed(part.nodes):
        if node.op == "get_attr" and not node.users:
            part.erase_node(node)
    return GraphModule(graph, part)


class Cutter:
    """Cuts one captured model; the training and the inference graph at the same places."""

    def __init__(self, captured: Captured) -> None:
        """Raise ModelError where the two graphs do not correspond operator by operator."""
        self.captured = captured
        training, inference = steps(captured.training), steps(captured.inference)
        if [n.target for n in training] != [n.target for n in inference]:
            raise ModelError(
                "The model runs other operators when it trains than when it predicts, so that "
                "one place cannot be found in both; it cannot be sliced."
            )
        if output_node(captured.training) is not training[-1]:
            raise ModelError("The model's output is not its last operator; it cannot be sliced.")
        self.end = len(training) - 1
        self.points = cut_points(captured.training)

    def trained(self, after: int) -> GraphModule:
        """What is behind place `after`, as it trains."""
        return subgraph(self.captured.training, after, self.end)

    def predicting(self, after: int) -> GraphModule:
        """What is behind place `after`, as it predicts."""
        return subgraph(self.captured.inference, after, self.end)

    def frozen(self, after: int, upto: int) -> GraphModule:
        """Operators between two places, as they predict."""
        return subgraph(self.captured.inference, after, upto)

    def load(self, part: GraphModule, batch: int) -> int:
        """Parameters plus activations of `part`: what its capacity counts."""
        return parameter_count(part, self.captured.parameters) + activations(part, batch)

    def stages(self, upto: int, limit: int, batch: int) -> list[GraphModule]:
        """The operators up to place `upto` in as few stages as `limit` allows.

        `limit` bounds parameters plus activations of a stage; a single stretch between two cut
        points that is larger stays whole.
        """
        places = [point.place for point in self.points if point.place <= upto]
        bounds = [-1]
        for place, following in zip(places, [*places[1:], None], strict=True):
            end = place if following is None else following
            if following is None or self.load(self.frozen(bounds[-1], end), batch) > limit:
                bounds.append(place)
        return [self.frozen(a, b) for a, b in pairwise(bounds)]


def tensors_read(parts: Sequence[GraphModule]) -> list[str]:
    """Names of all tensors that `parts` read, without repetition."""
    return list(dict.fromkeys(name for part in parts for name in attributes_read(part)))
