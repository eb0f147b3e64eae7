"""Stops the gradient of a path that was not taken.

In `where(c, a, b)`, the gradient of the value that was not chosen is 0. On the path of this value,
backpropagation multiplies this gradient by derivatives of divisions and logarithms. These
derivatives may be infinite, because the code of this path was not written for such numbers. An
example is the mean over no element. The product of 0 and infinity is not a number. So each operator
whose derivative may be infinite reads `where(c, x, x.detach())` instead of x. The value is x, but
there is no gradient if the path was not taken.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

aten = torch.ops.aten
UNBOUNDED = frozenset(
    getattr(aten, name)
    for name in (
        *("div", "reciprocal", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow"),
        *("exp", "expm1", "exp2", "sinh", "cosh", "tan", "acos", "asin", "acosh", "atanh"),
        *("logit", "xlogy", "linalg_vector_norm", "norm", "var", "std"),
    )
)
"""Operators whose derivative may be infinite, or not a number."""


def guard_gradients(graph: Graph, choices: Iterable[Node]) -> Iterator[tuple[Node, Node]]:
    """Guard the operators that only one path of a choice computes; see the top of this module.

    Args:
        graph: A graph whose nodes are in the order of execution.
        choices: Nodes `where(asked, one, other)` that choose between paths. If such a node is no
            longer in the graph, it is ignored.

    Yields:
        Each new node, with the operator that it guards. The node of the decision may come after the
        new node, so the caller must sort the nodes.
    """
    with_gradient: set[Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        moves = not isinstance(value, Tensor) or value.is_floating_point()
        given = node.op != "call_function" or not with_gradient.isdisjoint(node.all_input_nodes)
        if moves and given and node.target is not aten.detach.default:
            with_gradient.add(node)
    for choice in [choice for choice in choices if choice.users]:
        asked, *values = choice.args
        for taken, chosen in zip((True, False), values, strict=True):
            reads = [
                (node, value)
                for node in only_of(choice, chosen)
                if getattr(node.target, "overloadpacket", None) in UNBOUNDED
                for value in node.all_input_nodes
                if value in with_gradient
                and value.op != "get_attr"  # do not guard weights: layers must read them directly
            ]
            for node, value in reads:
                for new in _guard(graph, node, value, asked, taken=taken):
                    yield new, node


def only_of(choice: Node, chosen: object) -> list[Node]:
    """The operators that are needed only for `chosen`, which is an argument of `choice`."""
    found: dict[Node, None] = {}
    if sum(argument is chosen for argument in choice.args) > 1:
        return []
    waiting = [chosen]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or node.op != "call_function":
            continue
        if node in found or node is choice.args[0]:
            continue
        # A node is visited again after its last user.
        if all(user in found or (user is choice and node is chosen) for user in node.users):
            found[node] = None
            waiting += node.all_input_nodes
    return list(found)


def _guard(graph: Graph, node: Node, value: Node, asked: Any, *, taken: bool) -> tuple[Node, Node]:
    """Let no gradient through `node` to `value`, which it reads, unless `asked` is `taken`."""
    with graph.inserting_before(node):
        alone = graph.call_function(aten.detach.default, (value,))
        pair = (value, alone) if taken else (alone, value)
        guarded = graph.call_function(aten.where.self, (asked, *pair))
    alone.meta, guarded.meta = dict(value.meta), dict(value.meta)
    node.replace_input_with(value, guarded)
    return alone, guarded
