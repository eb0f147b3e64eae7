"""Shorter forms of what a traced training step computes.

A pass changes a graph in place and leaves its results as they are, but for rounding.
"""

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten

Pass = Callable[[GraphModule], None]


def cancel_permutations(graph: GraphModule) -> None:
    """permute(permute(x, p), q) becomes permute(x, p after q), or x where that changes nothing."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.permute.default):
        inner = node.args[0]
        if inner.target is not aten.permute.default:
            continue
        dims = [inner.args[1][dim] for dim in node.args[1]]
        if dims == list(range(len(dims))):
            node.replace_all_uses_with(inner.args[0])
        else:
            node.args = (inner.args[0], dims)


def accumulate_products(graph: GraphModule) -> None:
    """number * c + a @ b, as momentum and weight decay have it, becomes one product that adds."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if node.kwargs or len(node.args) != 2:
            continue
        for scaled, product in (node.args, node.args[::-1]):
            if is_scaled(scaled) and is_matrix_product(product):
                with graph.graph.inserting_before(node):
                    fused = graph.graph.call_function(
                        aten.addmm.default,
                        (scaled.args[0], *product.args),
                        {"beta": scaled.args[1]},
                    )
                fused.meta = dict(node.meta)
                node.replace_all_uses_with(fused)
                break


def is_scaled(node: object) -> bool:
    """Whether `node` is a tensor times a number that only one node reads."""
    return (
        isinstance(node, Node)
        and node.target is aten.mul.Tensor
        and isinstance(node.args[1], int | float)
        and len(node.users) == 1
    )


def is_matrix_product(node: object) -> bool:
    """Whether `node` is a product of two matrices that only one node reads."""
    return isinstance(node, Node) and node.target is aten.mm.default and len(node.users) == 1


PASSES: tuple[Pass, ...] = (cancel_permutations, accumulate_products)


def shorten(graph: GraphModule) -> GraphModule:
    """All passes, and nothing left that no result depends on."""
    for change in PASSES:
        change(graph)
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
    graph.recompile()
    return graph
