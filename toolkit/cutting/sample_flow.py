"""Separates values of a recorded graph that depend on the samples from all other values.

Position ids, rotary tables and causal masks depend at most on the samples' shape. They count as
constants: both sides of a cut compute them. Integers and booleans never cross a cut: if they depend
on samples or activations, they are computed again after the cut.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from exporters.programs.recorded_graph import (
    casts_to_integers,
    input_node,
    is_impure,
    output_node,
)
from exporters.programs.seeded_random import DRAW

aten = torch.ops.aten
SHAPE_READERS = {
    aten.sym_size.int: 0,
    aten.zeros_like.default: 0,
    aten.ones_like.default: 0,
    aten.full_like.default: 0,
    aten.empty_like.default: 0,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 0,
    aten.new_full.default: 0,
    aten.new_empty.default: 0,
    DRAW: 0,
    aten.expand_as.default: 1,
    aten.view_as.default: 1,
    aten.reshape_as.default: 1,
    aten.type_as.default: 1,
    aten.to.other: 1,
}
"""Operators that read only the shape or type of one argument, and that argument's position."""


class SampleFlow:
    """The operators of a graph that compute activations, and how long each activation is needed.

    Attributes:
        graph: The recorded graph.
        operators: The operators whose values depend on the values of the samples, in order of
            execution. Operators that compute integers or booleans are left out.
        position: The index of each operator in `operators`; -1 for the samples.
        of_samples: The samples, and operators that read only samples and constants.
        ids: The values in `of_samples` whose numbers become integers, such as ids.
        updates: Operators that change a tensor of the model. These stay even if nothing reads their
            result.
    """

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        self.batch: torch.SymInt = input_node(graph).meta["val"].shape[0]
        self.updates = [n for n in graph.graph.nodes if n.op == "call_function" and is_impure(n)]
        self.operators: list[Node] = []
        self.position = {input_node(graph): -1}
        self._needed = self.ancestors([output_node(graph), *self.updates])
        dependent = {input_node(graph)}
        for node in graph.graph.nodes:
            if node not in self._needed or not dependent & set(self.values_read(node)):
                continue
            dependent.add(node)
            if not is_recomputed(node):
                self.position[node] = len(self.operators)
                self.operators.append(node)
        self.of_samples = {input_node(graph)}
        for node in self.operators:
            if set(self.values_read(node)) <= self.of_samples:
                self.of_samples.add(node)
        casts = [node for node in graph.graph.nodes if casts_to_integers(node)]
        self.ids = self.of_samples & self.ancestors(casts)
        self._behind: dict[Node, tuple[frozenset[Node], frozenset[Node]]] = {}

    def values_read(self, node: Node) -> list[Node]:
        """The nodes whose values `node` reads, except nodes of which only the shape is read."""
        position = shape_argument(node)
        if position is None or not self.knows_shape(node.args[position]):
            return node.all_input_nodes
        others = [argument for i, argument in enumerate(node.args) if i != position]
        reads: dict[Node, None] = {}
        map_arg((others, node.kwargs), lambda read: reads.setdefault(read))
        return list(reads)

    def knows_shape(self, node: object) -> bool:
        """Whether each size of the value of `node` is a number or a multiple of the batch size."""
        value = node.meta.get("val") if isinstance(node, Node) else None
        return isinstance(value, Tensor) and all(
            isinstance(size, int) or self.samples_times(size) is not None for size in value.shape
        )

    def samples_times(self, size: object) -> int | None:
        """The number n if `size` is n times the batch size of the recording, else None."""
        if not isinstance(size, torch.SymInt):
            return None
        # Expressions are compared: comparing sizes would add guards to the recording.
        factor = size.node.expr / self.batch.node.expr
        return int(factor) if factor.is_Integer else None

    def ancestors(self, nodes: list[Node]) -> set[Node]:
        """`nodes` and all nodes whose values they need."""
        needed, pending = set(nodes), list(nodes)
        while pending:
            new = set(self.values_read(pending.pop())) - needed
            needed |= new
            pending += new
        return needed

    def behind(self, node: Node) -> tuple[frozenset[Node], frozenset[Node]]:
        """The nodes from which `node` is computed: activations or samples, and constants.

        Only the nearest activations are returned. The constants are all nodes between these
        activations and `node`, and the nodes from which these constants are computed.
        """
        if node not in self._behind:
            activations, constants = set[Node](), set[Node]()
            for read in self.values_read(node):
                if read in self.position:
                    activations.add(read)
                else:
                    further = self.behind(read)
                    activations |= further[0]
                    constants |= {read, *further[1]}
            self._behind[node] = frozenset(activations), frozenset(constants)
        return self._behind[node]

    def tensors_read(self, node: Node) -> set[str]:
        """Names of the model's tensors that `node` reads, directly or through other constants."""
        return {
            str(constant.target) for constant in self.behind(node)[1] if constant.op == "get_attr"
        }

    def crossings(self) -> Iterator[tuple[Node, ...]]:
        """Yield for each position the activations and samples whose values are needed after it."""
        last = dict[Node, int]()
        for position, node in enumerate(self.operators):
            last |= dict.fromkeys(self.behind(node)[0], position)
        # The output is needed after the last position.
        last[output_node(self.graph)] = len(self.operators)
        alive = {input_node(self.graph): None}
        for position, node in enumerate(self.operators):
            alive[node] = None
            alive = {
                activation: None for activation in alive if last.get(activation, -1) > position
            }
            yield tuple(alive)

    def sample_axis(self, node: Node) -> int | None:
        """The axis of `node` that counts samples, if all other sizes are numbers; else None."""
        value = node.meta["val"]
        axes = [i for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
        return axes[0] if len(axes) == 1 and self.samples_times(value.shape[axes[0]]) == 1 else None


def shape_argument(node: Node) -> int | None:
    """The position of the argument that gives `node` only a shape or a type, if there is one."""
    return SHAPE_READERS.get(node.target)  # type: ignore[call-overload,no-any-return]


def is_recomputed(node: Node) -> bool:
    """Whether `node` computes integers, booleans or a size, which never cross a cut."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return not value.is_floating_point() and not value.is_complex()
    return not isinstance(value, tuple | list)
