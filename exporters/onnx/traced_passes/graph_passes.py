"""Passes that shorten a traced training step, or compute it more precisely.

A pass changes a graph in place. The results of the graph stay the same except for rounding.
"""

import operator
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from exporters.onnx.traced_passes.part_passes import (
    concatenate_parts,
    cut_before_moving,
    move_before_concatenating,
)
from exporters.onnx.traced_passes.sample_ids import refuse_negative_ids
from exporters.onnx.traced_passes.small_probabilities import keep_small_probabilities
from exporters.onnx.traced_passes.traced_nodes import add_before, is_known, same_sizes, shape_of

aten = torch.ops.aten

Pass = Callable[[GraphModule], None]

SCALINGS = (aten.div.Scalar, aten.div.Tensor, aten.mul.Tensor)
"""Operators that multiply by a number or divide by it."""


def read_sizes_of_inputs(graph: GraphModule) -> None:
    """Let the graph read the batch size only from its inputs, not from computed values.

    Otherwise a runtime may read the size of a large value late, and keep the value in memory until
    then.
    """
    batches = {
        size.node.expr: (node, axis)
        for node in graph.graph.find_nodes(op="placeholder")
        for axis, size in enumerate(shape_of(node))
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol
    }
    known: dict[object, Node] = {}
    for node in graph.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        size = node.meta["val"]
        for symbol, (given, axis) in batches.items() if isinstance(size, torch.SymInt) else ():
            times = size.node.expr / symbol
            if times.is_Integer:
                if symbol not in known:
                    known[symbol] = add_before(node, aten.sym_size.int, given, axis)
                batch = known[symbol]
                same = batch if times == 1 else add_before(node, operator.mul, batch, int(times))
                node.replace_all_uses_with(same)


def drop_copies(graph: GraphModule) -> None:
    """Remove copies and reshapes that change nothing, because they hide patterns from other passes.

    PyTorch inserts copies because a view can need contiguous memory. Without a copy, a view could
    fail, so all views become reshapes.
    """
    results = graph.graph.output_node()
    for view in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        view.target = aten.reshape.default
    for target in (aten.clone.default, aten.expand.default, aten.reshape.default):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            given = node.args[0]
            if results not in node.users and same_sizes(shape_of(given), shape_of(node)):
                node.replace_all_uses_with(given)


def repeat_while_computing(graph: GraphModule) -> None:
    """Let operators broadcast a small tensor, instead of writing its copies into memory first.

    Such copies come from gradients of means.
    """
    for node in graph.graph.find_nodes(op="call_function", target=aten.expand.default):
        for user in [*node.users] if len(node.users) == 1 else []:
            if user.target in SCALINGS and not isinstance(user.args[1], Node):
                small = add_before(node, user.target, node.args[0], user.args[1])
                again = add_before(node, aten.expand.default, small, node.args[1])
                user.replace_all_uses_with(again)
    for node in graph.graph.find_nodes(op="call_function", target=aten.expand.default):
        for user in [*node.users]:
            if user.target in (aten.add.Tensor, aten.mul.Tensor):
                others = [a for a in user.args if isinstance(a, Node) and a is not node]
                if any(same_sizes(shape_of(other), shape_of(user)) for other in others):
                    user.replace_input_with(node, node.args[0])


def multiply_in_batches(graph: GraphModule) -> None:
    """Let a product of batches of matrices keep all batch axes.

    PyTorch first joins several batch axes into one axis, which the runtime does not need. Without
    this reshape, the product reads a transposed matrix directly, so the runtime can avoid the
    transposition.
    """
    for node in graph.graph.find_nodes(op="call_function", target=aten.bmm.default):
        first, second = node.args
        if first.target is not aten.reshape.default or second.target is not first.target:
            continue
        a, b = first.args[0], second.args[0]
        rows, columns = shape_of(a), shape_of(b)
        high, wide = shape_of(node)[1:]
        # The last two axes must be the matrices themselves, not joined with the batch.
        whole = same_sizes(rows[-2:], shape_of(first)[1:])
        whole = whole and same_sizes(columns[-2:], shape_of(second)[1:])
        if not whole or not same_sizes(rows[:-2], columns[:-2]) or not is_known(high, wide):
            continue
        product = add_before(node, aten.matmul.default, a, b)
        sizes = [first.args[1][0], high, wide]
        node.replace_all_uses_with(add_before(node, aten.reshape.default, product, sizes))


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
    """Replace reshape(reshape(x, a), b) by reshape(x, b)."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.reshape.default):
        inner = node.args[0]
        if inner.target is aten.reshape.default:
            node.args = (inner.args[0], node.args[1])


def scale_smaller_factors(graph: GraphModule) -> None:
    """Replace (x @ matrix) * number by x @ (matrix * number) if only x grows with the batch."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        product, number = node.args
        views = []
        while product.target is aten.reshape.default and len(product.users) == 1:
            views.append(product)
            product = product.args[0]
        if not isinstance(number, int | float) or not is_matrix_product(product):
            continue
        rows, matrix = product.args
        if is_known(*shape_of(rows)) or not is_known(*shape_of(matrix)):
            continue
        scaled = add_before(node, aten.mul.Tensor, matrix, number)
        product = add_before(node, aten.mm.default, rows, scaled)
        for view in reversed(views):
            product = add_before(node, aten.reshape.default, product, view.args[1])
        node.replace_all_uses_with(product)


def accumulate_products(graph: GraphModule) -> None:
    """Replace number * c + a @ b (from momentum) and c - a @ b by one `addmm`."""
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
    """Replace `node` by one addmm with `factors`."""
    node.replace_all_uses_with(
        add_before(node, aten.addmm.default, added, *product.args, **factors)
    )


def is_like(node: object, other: Node) -> bool:
    """Whether `node` is a tensor of the shape of `other`."""
    return isinstance(node, Node) and same_sizes(shape_of(node), shape_of(other))


def is_scaled(node: object) -> bool:
    """Whether `node` is a tensor times a number and has one reader.

    If there were a second reader, the product would be computed anyway, so fusing it would save
    nothing.
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


PASSES: tuple[Pass, ...] = (
    refuse_negative_ids,
    keep_small_probabilities,
    read_sizes_of_inputs,
    drop_copies,
    repeat_while_computing,
    multiply_in_batches,
    concatenate_parts,
    move_before_concatenating,
    cut_before_moving,
    cancel_permutations,
    join_views,
    drop_copies,
    scale_smaller_factors,
    accumulate_products,
)


def shorten(graph: GraphModule) -> GraphModule:
    """Run all passes on `graph`, and remove nodes on which no result depends."""
    for change in PASSES:
        change(graph)
        graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph
