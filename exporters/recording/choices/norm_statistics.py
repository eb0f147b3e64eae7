"""Separates the statistics of batch norms that run only on some paths through a model's code.

ATen's batch norm updates its statistics itself. But if a path leaves the batch norm out, the
statistics must not change. So separate operators compute and store the statistics, and a choice can
select between their results.
"""

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten


def statistics_of_some_paths(graphs: Sequence[GraphModule]) -> set[str]:
    """The running means of the batch norms that do not run equally often in all `graphs`."""
    counts = [Counter(map(running_mean, norms_in(graph.graph))) for graph in graphs]
    names = {name for count in counts for name in count}
    return {name for name in names if len({count[name] for count in counts}) > 1}


def separate_statistics(graph: GraphModule, means: Container[str]) -> None:
    """Let the batch norms of `graph` with these running `means` store their statistics."""
    newest = dict[Node, Node]()
    for norm in norms_in(graph.graph):
        if running_mean(norm) in means:
            separate(graph.graph, norm, newest)
    store(graph.graph, newest)


def norms_in(graph: Graph) -> list[Node]:
    """The batch norms of `graph` that update statistics."""
    return list(filter(updates_statistics, graph.nodes))


def running_mean(norm: Node) -> str:
    """The name of the running mean that `norm` updates."""
    mean: Any = norm.args[3]
    return str(mean.target)


def updates_statistics(node: Node) -> bool:
    """Whether `node` is a batch norm that updates its statistics."""
    return node.target is aten.batch_norm.default and bool(node.args[5] and node.args[3])


def separate(graph: Graph, norm: Node, newest: dict[Node, Node]) -> None:
    """Replace the statistics of `norm` by operators. `newest` has the newest values so far."""
    arguments: Any = norm.args
    x, weight, bias, mean, variance, _, momentum, eps, cudnn = arguments
    value: Tensor = x.meta["val"]
    axes = [axis for axis in range(value.dim()) if axis != 1]

    def call(target: Any, *args: Any, **named: Any) -> Node:
        node = graph.call_function(target, args, named)
        node.meta = {**norm.meta, "val": mean.meta["val"]}
        return node

    with graph.inserting_after(norm):
        output = graph.call_function(
            aten.batch_norm.default, (x, weight, bias, None, None, True, momentum, eps, cudnn)
        )
    output.meta = dict(norm.meta)
    norm.replace_all_uses_with(output)
    with graph.inserting_before(output):
        read = call(aten.detach.default, x)
        read.meta["val"] = value
        statistics = (
            call(aten.mean.dim, read, axes),
            call(aten.var.correction, read, axes, correction=1),
        )
        for buffer, batch in zip((mean, variance), statistics, strict=True):
            old = newest.get(buffer, buffer)
            newest[buffer] = call(
                aten.add.Tensor,
                call(aten.mul.Tensor, old, 1 - momentum),
                call(aten.mul.Tensor, batch, momentum),
            )
    graph.erase_node(norm)


def store(graph: Graph, newest: dict[Node, Node]) -> None:
    """Store the `newest` value of each buffer at the end of `graph`."""
    with graph.inserting_before(graph.output_node()):
        for buffer, value in newest.items():
            kept = graph.call_function(aten.copy_.default, (buffer, value))
            kept.meta = dict(value.meta)
