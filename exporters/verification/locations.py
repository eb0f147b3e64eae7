"""Finds the parameter and the source line of an operator in a traced graph."""

from collections.abc import Callable, Iterable, Mapping
from typing import cast

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from exporters.programs.program import ProgramSignature
from exporters.programs.source_lines import place_of_operator, place_of_tensor


def operator_name(node: Node) -> str:
    """The name of the operator or Python function that `node` calls, like aten::convolution."""
    target = node.target
    return target._schema.name if isinstance(target, OpOverload) else str(target)


def nearest_parameter(module: GraphModule, signature: ProgramSignature, node: Node) -> str:
    """The name of the state tensor nearest to `node` in the graph. Empty if there is none."""
    read = {
        source: port.state
        for source, port in zip(
            module.graph.find_nodes(op="placeholder"), signature.inputs, strict=True
        )
        if port.state is not None
    }
    returned = {
        source: port.state
        for source, port in zip(
            cast(list[Node], module.graph.output_node().args[0]), signature.outputs, strict=True
        )
        if port.state is not None
    }
    before = search(node, read, lambda node: node.all_input_nodes)
    behind = search(node, returned, lambda node: node.users)
    nearest = [distance for distance in (before, behind) if distance is not None]
    return min(nearest)[1] if nearest else ""


def search(
    start: Node, names: Mapping[Node, str], neighbours: Callable[[Node], Iterable[Node]]
) -> tuple[int, str] | None:
    """Find the node in `names` that is nearest to `start`.

    Returns the distance and the name of this node. None if `start` is not connected to such a node.
    """
    seen, edge, steps = {start}, [start], 0
    while edge:
        named = [names[node] for node in edge if node in names]
        if named:
            return steps, named[0]
        ahead = dict.fromkeys(neighbour for node in edge for neighbour in neighbours(node))
        edge = [node for node in ahead if node not in seen]
        seen.update(edge)
        steps += 1
    return None


def place_in_source(signature: ProgramSignature, parameter: str, operator: str) -> str:
    """Module and source line that reads `parameter`. If unknown, the line that calls `operator`."""
    return place_of_tensor(signature.source, parameter) or place_of_operator(
        signature.source, operator
    )
