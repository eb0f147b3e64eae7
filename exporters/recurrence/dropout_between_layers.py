"""Splits recurrent operators with dropout between layers into single layers and dropouts.

The masks of a graph's dropouts are computed from the device's seed. As in PyTorch, a mask has the
axes (time, batch, features).
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from exporters.recurrence.recurrent_layers import RECURRENT

aten = torch.ops.aten


def split_at_dropouts(graph: GraphModule) -> None:
    """Replace the recurrent operators of `graph` that have dropout between layers.

    Args:
        graph: A recorded graph. The graph is edited.
    """
    for node in list(graph.graph.nodes):
        # Dropout follows each layer except the last.
        if node.target in RECURRENT and node.args[4] > 1 and node.args[5] > 0:
            with graph.graph.inserting_before(node):
                results = SingleLayers(graph.graph, node).results()
            for user in list(node.users):  # each user takes one result
                user.replace_all_uses_with(results[user.args[1]])
                graph.graph.erase_node(user)
            graph.graph.erase_node(node)


class SingleLayers:
    """Adds each layer of the recurrent operator `node` to `graph` as a separate operator."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph, self._node = graph, node

    def results(self) -> list[Node]:
        """Add the layers to the graph, and return the results of the replaced operator.

        The results are the output sequence of the last layer, then the final states of every layer.
        """
        arguments: Any = self._node.args
        x, states, params, biases, count, rate, train, both, batch_first, *lengths = arguments
        single = isinstance(states, Node)
        firsts = [states] if single else list(states)
        directions = 2 if both else 1
        size = len(params) // count
        if batch_first:
            x = self._call(aten.transpose.int, x, 0, 1)
        lasts: list[list[Node]] = []
        for layer in range(count):
            if layer:
                x = self._call(aten.dropout.default, x, rate, train)
            rows = layer * directions, (layer + 1) * directions
            own = [self._call(aten.slice.Tensor, h, 0, *rows) for h in firsts]
            weights = list(params[layer * size : (layer + 1) * size])
            given = own[0] if single else own
            settings = biases, 1, 0.0, train, both, False
            ran = self._call(self._node.target, x, given, weights, *settings, *lengths)
            x, *last = (self._call(operator.getitem, ran, n) for n in range(1 + len(firsts)))
            lasts.append(last)
        if batch_first:
            x = self._call(aten.transpose.int, x, 0, 1)
        return [
            x,
            *(self._call(aten.cat.default, list(column)) for column in zip(*lasts, strict=True)),
        ]

    def _call(self, target: Any, *args: Any) -> Node:
        """Add a node with the module and the source line of the recurrent operator."""
        node = self._graph.call_function(target, args)
        values: Any = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        # The values have no data. For their shapes alone, PyTorch would run every step.
        value = layer_shapes(*values) if target in RECURRENT else target(*values)
        node.meta = {**self._node.meta, "val": value}
        return node


def layer_shapes(x: Tensor, states: Tensor | list[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    """Results of one layer without data; x is (T, B, i), states are (directions, B, n)."""
    given = [states] if isinstance(states, Tensor) else states
    directions, _, units = given[0].shape
    sequence = x.new_empty((*x.shape[:2], directions * units))
    return sequence, *(state.new_empty(state.shape) for state in given)
