"""Adding operators to a captured graph so that every node still knows its value's shape."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node, map_arg


class Edit:
    """Adds operators to a graph together with the shapes of their results."""

    def __init__(self, graph: Graph, source: Node) -> None:
        self.graph, self.source = graph, source
        self.mode = source.meta["val"].fake_mode

    def add(self, target: Callable[..., Any], *args: Any) -> Node:
        """A new node where the graph is being edited."""
        node = self.graph.call_function(target, args)
        self.measure(node)
        return node

    def measure(self, node: Node) -> None:
        """Work out the shape of `node` anew from its arguments'."""
        assert callable(node.target)
        with self.mode, enable_python_dispatcher():
            node.meta["val"] = node.target(*map_arg(node.args, lambda n: n.meta["val"]))

    def empty_rows(self, width: int) -> Tensor:
        """A tensor without data (batch, width)."""
        value = self.source.meta["val"]
        with self.mode:
            return value.new_empty((value.shape[0], width))  # type: ignore[no-any-return]
