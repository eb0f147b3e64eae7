"""Passes that shorten a traced training step.

A pass changes a graph in place. The results of the graph stay the same except for rounding.
"""

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

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


def accumulate_products(graph: GraphModule) -> None:
    """Replace number * c + a @ b, from momentum and weight decay, by one product that adds."""
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
                # Later passes and the export read shape and type from `meta`.
                fused.meta = dict(node.meta)
                node.replace_all_uses_with(fused)
                break


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


PASSES: tuple[Pass, ...] = (cancel_permutations, accumulate_products)


def shorten(graph: GraphModule) -> GraphModule:
    """Run all passes on `graph` and remove nodes that no result depends on."""
    for change in PASSES:
        change(graph)
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
    graph.recompile()
    return graph
