"""Computes values of a traced graph in float64: all outputs, or one value from other values."""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, map_arg

from device_agent.system.process_memory import release_unused
from exporters.programs.recorded_graph import attribute
from exporters.verification.double_precision import DEFINED, doubled

aten = torch.ops.aten
CONTIGUOUS = (aten.native_group_norm.default, aten.native_group_norm_backward.default)
"""Operators that take only contiguous tensors."""
VIEWS = (aten.view.default, aten._unsafe_view.default)

MADE_BYTES = 2**27
"""Each time this many bytes of values have been computed, free memory is returned to the system.
Otherwise glibc keeps free blocks below 32 MB that lie between used blocks: for GPT-2 with 30
million parameters, these are 0.8 of 2 GB."""

Values = Mapping[Node, Any]
"""The values of nodes: tensors or numbers, or several of them."""
Judge = Callable[[Node, Values], None]
"""Takes an operator that was just computed, and all values that are then known."""


@dataclass(frozen=True)
class Cone:
    """The operators that compute the value of one node from the values of other nodes.

    Attributes:
        nodes: The operators in the order of the graph. The last operator is the node.
        leaves: The nodes whose values the operators read.
    """

    nodes: tuple[Node, ...]
    leaves: tuple[Node, ...]


def cone_of(node: Node, is_known: Callable[[Node], bool], number: Mapping[Node, int]) -> Cone:
    """The cone of `node` over the inputs of the graph and the nodes for which `is_known` is true.

    `number` maps each node to its position in the graph.
    """
    inside, leaves, waiting = {node}, set[Node](), [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source.op == "placeholder" or is_known(source):
                leaves.add(source)
            elif source not in inside:
                inside.add(source)
                waiting.append(source)
    return Cone(*(tuple(sorted(part, key=number.__getitem__)) for part in (inside, leaves)))


def evaluated(module: GraphModule, cone: Cone, leaves: Values) -> tuple[Tensor, int]:
    """Compute the value of a cone in float64 from the values of its leaves.

    Returns the value, and the number of elements of the largest tensor that an operator reads.
    """
    values = {node: leaves[node] for node in cone.leaves}
    last = {source: node for node in cone.nodes for source in node.all_input_nodes}
    largest = 0
    for node in cone.nodes:
        values[node] = computed(module, node, values)
        for source in node.all_input_nodes:
            if isinstance(value := values[source], Tensor):
                largest = max(largest, value.numel())
            if last[source] is node:
                del values[source]
    return values[cone.nodes[-1]], largest


def computed(module: GraphModule, node: Node, known: Values) -> Any:
    """The value of `node`, which is a constant or an operator whose inputs are `known`."""
    if node.op == "get_attr":
        return attribute(module, str(node.target))
    # The inputs of the graph are float32 until an operator reads them, to save memory.
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: doubled(known[source]))
    # A float64 result may have another memory layout than while tracing, where a view fails.
    target = aten.reshape.default if node.target in VIEWS else node.target
    if node.target in CONTIGUOUS:
        args = tuple(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args)
    target = DEFINED.get(target, target)
    value = cast(Callable[..., Any], target)(*args, **kwargs)
    # Operators that make a tensor choose float32 by default.
    return doubled(value) if isinstance(value, Tensor) else value


def computes_tensor(node: Node) -> bool:
    """Whether `node` is an operator whose value is one tensor."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(cast(Node, node.args[0]).target, OpOverload)
    if not isinstance(node.target, OpOverload):
        return False  # arithmetic with sizes
    returns = node.target._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)


def results_of(module: GraphModule) -> list[Node]:
    """The nodes whose values a traced graph returns, in the order of its outputs."""
    return list(cast(Sequence[Node], module.graph.output_node().args[0]))


def by_effort(module: GraphModule) -> list[int]:
    """The indices of the outputs of `module`. Outputs that need the fewest operators come first.

    In this order, the last layers are updated first, so no gradient stays in memory until all other
    gradients are known.
    """
    bits: dict[Node, int] = {}
    for number, node in enumerate(module.graph.nodes):
        needed = 1 << number if node.op == "call_function" else 0
        for source in node.all_input_nodes:
            needed |= bits[source]
        bits[node] = needed
    results = results_of(module)
    return sorted(range(len(results)), key=lambda n: bits[results[n]].bit_count())


class LazyOutputs:
    """Computes the outputs of a traced graph one by one. Releases a value after its last reader.

    Attributes:
        nodes: The nodes in the order in which they are computed.
        steps: The nodes in this order. The index of an output comes after the last node that the
            output needs.
    """

    def __init__(self, module: GraphModule, outputs: Sequence[int]) -> None:
        """Take the graph, and the indices of its outputs in the order in which they are wanted."""
        self.module = module
        self._results = results_of(module)
        self.steps = list[Node | int]()
        self.nodes = list[Node]()
        known = set[Node]()
        for output in outputs:
            nodes = list(needed(self._results[output], known))
            self.nodes += nodes
            self.steps += [*nodes, output]

    def run(
        self,
        inputs: Sequence[Tensor],
        judge: Judge | None = None,
        also_read: Mapping[Node, Collection[Node]] | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the value of each output.

        Args:
            inputs: The values of the graph's placeholders, in order.
            judge: Called after each operator.
            also_read: The nodes whose values `judge` reads, for each operator.
        """
        released = self._released(also_read or {})
        # `judge` may read an input before the graph does, or one that the graph does not read.
        placeholders = self.module.graph.find_nodes(op="placeholder")
        known: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))
        made = 0
        for number, step in enumerate(self.steps):
            if isinstance(step, int):
                result = self._results[step]
                if result in released[number]:  # only the caller keeps it
                    yield step, known.pop(result)
                else:
                    yield step, known[result]
            elif step.op != "placeholder":
                known[step] = computed(self.module, step, known)
                made += nbytes(known[step])
                if judge is not None and step.op == "call_function":
                    judge(step, known)
            for source in released[number]:
                known.pop(source, None)
            if made > MADE_BYTES:
                release_unused()
                made = 0

    def _released(self, also_read: Mapping[Node, Collection[Node]]) -> list[list[Node]]:
        """For each step, list the nodes whose values are read for the last time in this step."""
        last: dict[Node, int] = {}
        for number, step in enumerate(self.steps):
            if isinstance(step, int):
                last[self._results[step]] = number
            else:
                read = (step, *step.all_input_nodes, *also_read.get(step, ()))
                last |= dict.fromkeys(read, number)
        released: list[list[Node]] = [[] for _ in self.steps]
        for node, number in last.items():
            released[number].append(node)
        return released


def nbytes(value: Any) -> int:
    """The size of `value` in bytes. 0 if it is not a tensor."""
    return value.nbytes if isinstance(value, Tensor) else 0


def needed(result: Node, known: set[Node]) -> Iterator[Node]:
    """Yield the nodes that `result` needs, then `result`, without the nodes in `known`.

    Adds each yielded node to `known`.
    """
    waiting = [result]
    while waiting:
        node = waiting[-1]
        missing = [source for source in node.all_input_nodes if source not in known]
        if missing:
            waiting += reversed(missing)
            continue
        waiting.pop()
        if node not in known:
            known.add(node)
            yield node
