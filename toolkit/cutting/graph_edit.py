"""Adding operators to a captured graph, with the shapes of their results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node, map_arg


class GraphEditor:
    """Adds operators to a graph and computes the shapes of their results."""

    def __init__(self, graph: Graph, source: Node) -> None:
        self.graph, self.source = graph, source
        self.mode = source.meta["val"].fake_mode

    def add(self, target: Callable[..., Any], *args: Any) -> Node:
        """Add an operator at the graph's current insertion point."""
        node = self.graph.call_function(target, args)
        self.update_shape(node)
        return node

    def update_shape(self, node: Node) -> None:
        """Compute the shape of `node` from the shapes of its arguments."""
        assert callable(node.target)
        # Fake tensors carry shapes without data. The dispatcher makes composite operators work on
        # them.
        with self.mode, enable_python_dispatcher():
            node.meta["val"] = node.target(*map_arg(node.args, lambda n: n.meta["val"]))

    def empty_rows(self, width: int) -> Tensor:
        """A float32 tensor (batch, width) without data."""
        value = self.source.meta["val"]
        with self.mode:
            return value.new_empty(  # type: ignore[no-any-return]
                (value.shape[0], width), dtype=torch.float32
            )
