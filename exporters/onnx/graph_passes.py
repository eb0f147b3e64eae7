"""Passes that shorten a traced training step.

A pass changes a graph in place. The results of the graph stay the same except for rounding.
"""

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

aten = torch.ops.aten

Pass = Callable[[GraphModule], None]


def cancel_permutations(graph: GraphModule) -> None:
    """Replace permute(permute(x, p), q) by one permute, or by x if the two cancel."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.permute.default):
        inner = node.args[0]
        if inner.target is not aten.permute.default:
            continue
        dims = [inner.args[1][dim] for dim in node.args[1]]
        if dims == list(range(len(dims))):
            node.replace_all_uses_with(inner.args[0])
        else:
            node.args = (inner.args[0], dims)


def join_views(graph: GraphModule) -> None:
    """Replace view(view(x, a), b) by view(x, b)."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        inner = node.args[0]
        if inner.target is aten.view.default:
            node.args = (inner.args[0], node.args[1])


def accumulate_products(graph: GraphModule) -> None:
    """Replace number * c + a @ b, from momentum, and c - a @ b by one product that adds."""
    for target in (aten.add.Tensor, aten.sub.Tensor):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            if node.kwargs or len(node.args) != 2:
                continue
            first, second = node.args
            if target is aten.sub.Tensor:
                if is_matrix_product(second) and is_like(first, node):
                    replace_sum(node, first, second, {"alpha": -1})
            elif is_scaled(first) and is_like(first, node) and is_matrix_product(second):
                replace_sum(node, first.args[0], second, {"beta": first.args[1]})
            elif is_scaled(second) and is_like(second, node) and is_matrix_product(first):
                replace_sum(node, second.args[0], first, {"beta": second.args[1]})


def replace_sum(node: Node, added: Node, product: Node, factors: dict[str, Argument]) -> None:
    """Let one addmm with `factors` take the place of `node`."""
    with node.graph.inserting_before(node):
        fused = node.graph.call_function(aten.addmm.default, (added, *product.args), factors)
    # Later passes and the export read shape and type from `meta`.
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)


def is_like(node: object, other: Node) -> bool:
    """Whether `node` is a tensor of the shape of `other`."""
    return isinstance(node, Node) and node.meta["val"].shape == other.meta["val"].shape


def is_scaled(node: object) -> bool:
    """Whether `node` is a tensor times a number and has one reader.

    A second reader would need the product itself, so fusing it would save nothing.
    """
    return (
        isinstance(node, Node)
        and node.target is aten.mul.Tensor
        and isinstance(node.args[1], int | float)
        and len(node.users) == 1
    )


def is_matrix_product(node: object) -> bool:
    """Whether `node` is a product of two matrices and has one reader."""
    return isinstance(node, Node) and node.target is aten.mm.default and len(node.users) == 1


PASSES: tuple[Pass, ...] = (cancel_permutations, join_views, accumulate_products)


def shorten(graph: GraphModule) -> GraphModule:
    """Run all passes on `graph` and remove nodes that no result depends on."""
    for change in PASSES:
        change(graph)
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
    graph.recompile()
    return graph
