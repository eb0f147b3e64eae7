"""Computes the values of a traced graph in float64, one node at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from exporters.programs.recorded_graph import attribute
from exporters.verification.double_precision import doubled

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class Result:
    """The result of a node.

    Attributes:
        value: A tensor or a number, or several of them.
        nudged: Computes the value again, with rounding errors added to the inputs.
        read: Number of elements of the operator's largest input.
    """

    value: Any
    nudged: Callable[[], Any]
    read: int = 0


Judge = Callable[[Node, Result], Result]
"""Takes a node and its result; returns the result that later nodes read."""


def run_graph(
    module: GraphModule,
    inputs: Sequence[Tensor],
    judge: Judge,
    nudge: Callable[[Tensor], Tensor] = lambda value: value,
    keep_outputs: bool = True,
) -> list[Tensor]:
    """Run a traced graph; a value is released after the last node that reads it.

    Args:
        module: A traced graph in float64.
        inputs: The values of its placeholders, in order.
        judge: Called after each operator.
        nudge: Adds rounding errors to an input, for `Result.nudged`.
        keep_outputs: Whether to return the outputs. They take twice the memory of the model.

    Returns:
        The graph's outputs, after `judge`; none if they are not kept.
    """
    known: dict[Node, Result] = {}
    released = last_reads(module, keep_outputs)
    ahead = iter(inputs)
    results: list[Tensor] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            known[node] = leaf(next(ahead), nudge)
        elif node.op == "get_attr":
            known[node] = leaf(attribute(module, str(node.target)), lambda value: value)
        elif node.op == "call_function":
            known[node] = judge(node, computed(node, known))
        elif keep_outputs:
            results = [known[source].value for source in node.args[0]]
        for source in released.get(node, ()):
            del known[source]
    return results


def leaf(value: Tensor, nudge: Callable[[Tensor], Tensor]) -> Result:
    """Wrap `value` as a result that depends on no other node."""
    return Result(value, lambda: nudge(value))


def computed(node: Node, known: Mapping[Node, Result]) -> Result:
    """Call the operator `node` on the results of its inputs."""
    sources = {source: known[source] for source in node.all_input_nodes}

    def call(read: Callable[[Result], Any]) -> Any:
        # The inputs of the graph are float32 until an operator reads them, to save memory.
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: doubled(read(sources[n])))
        # A float64 result may have another memory layout than while tracing, where a view fails.
        target = aten.reshape.default if node.target in VIEWS else node.target
        value = cast(Callable[..., Any], target)(*args, **kwargs)
        # Operators that make a tensor choose float32 by default.
        return doubled(value) if isinstance(value, Tensor) else value

    tensors = [result.value for result in sources.values() if isinstance(result.value, Tensor)]
    return Result(
        call(lambda result: result.value),
        lambda: call(lambda result: result.nudged()),
        max((tensor.numel() for tensor in tensors), default=0),
    )


def last_reads(module: GraphModule, keep_outputs: bool) -> dict[Node, list[Node]]:
    """Map each node to the nodes whose values can be released after it has run.

    With `keep_outputs`, the outputs are needed until the end of the graph.
    """
    seen: set[Node] = set()
    readers: dict[Node, list[Node]] = {}
    for node in reversed(module.graph.nodes):
        if node.op == "output" and not keep_outputs:
            continue
        last = [source for source in node.all_input_nodes if source not in seen]
        if node not in seen and node.op != "output":
            last.append(node)
        seen.update(last)
        readers[node] = last
    return readers
