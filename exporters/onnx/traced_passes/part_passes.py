"""Passes for tensors that are cut into parts and joined again, for example by attention.

PyTorch stacks queries, keys and values along a new first axis before it cuts them apart. In the
backward pass, PyTorch pads the gradient of each part with zeros to the size of the whole tensor,
and adds the padded gradients. ONNX Runtime would copy the whole tensor each time.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch.fx import GraphModule, Node

from exporters.onnx.traced_passes.traced_nodes import (
    Size,
    add_before,
    is_known,
    same_sizes,
    shape_of,
)

aten = torch.ops.aten

Order = list[int | None]
"""For each axis of a tensor, the same axis in its source; None for a new axis of size 1."""
MOVERS = (
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.reshape.default,
)
CUTS = (aten.select.int, aten.slice.Tensor)


class Part(NamedTuple):
    """A tensor that is padded with zeros before and behind along one axis."""

    axis: int
    before: int
    length: int
    behind: int
    tensor: Node


def cut_before_moving(graph: GraphModule) -> None:
    """Cut a tensor into parts before its axes move, so that only the parts are copied."""
    cuts: dict[tuple[Node, int], list[Node]] = {}
    for node in graph.graph.nodes:
        if node.target in CUTS:
            whole, dim = cast(tuple[Node, int], (*node.args, 0)[:2])
            cuts.setdefault((whole, dim % len(shape_of(whole))), []).append(node)
    for (whole, dim), parts in cuts.items():
        source, order = source_of(whole)
        axis = order[dim]
        lengths = [shape_of(p)[dim] if p.target is aten.slice.Tensor else 1 for p in parts]
        # Parts that overlap, as windows do, would be larger than the whole.
        if source is whole or axis is None or not fit_into(lengths, shape_of(whole)[dim]):
            continue
        for part in parts:
            cut = add_before(part, part.target, source, axis, *part.args[2:])
            rest = order
            if part.target is aten.select.int:
                left = (old for old in order if old != axis)
                rest = [old if old is None or old < axis else old - 1 for old in left]
            part.replace_all_uses_with(arranged(cut, rest, part))


def concatenate_parts(graph: GraphModule) -> None:
    """If each summand of a sum is a part padded with zeros, replace the sum by a concatenation."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        padded = [part_of(summand) for summand in summands(node)] if is_sum(node) else []
        parts = sorted((part for part in padded if part is not None), key=lambda part: part[:2])
        if not parts or len(parts) < len(padded) or not complete(parts):
            continue
        tensors = [part.tensor for part in parts]
        node.replace_all_uses_with(add_before(node, aten.cat.default, tensors, parts[0].axis))


def move_before_concatenating(graph: GraphModule) -> None:
    """If parts have size 1 along the axis that joins them, move their axes first."""
    for node in reversed(graph.graph.nodes):
        if node.target not in MOVERS:
            continue
        whole, order = source_of(node, shared=False)
        if whole is node or whole.target is not aten.cat.default:
            continue
        parts, axis = whole.args[0], cast(int, whole.args[1] if len(whole.args) > 1 else 0)
        axis %= len(shape_of(whole))
        kept = [old for old in order if old is not None and old != axis]
        if axis not in order or kept != sorted(kept):
            continue
        if not all(is_one(shape_of(part)[axis]) for part in cast(Sequence[Node], parts)):
            continue
        rows = [arranged(part, order, node) for part in cast(Sequence[Node], parts)]
        node.replace_all_uses_with(add_before(node, aten.cat.default, rows, order.index(axis)))


def source_of(node: Node, shared: bool = True) -> tuple[Node, Order]:
    """Go back from `node` over operators that only move axes; return their source and the order.

    These operators permute axes, or add or remove axes of size 1. For each axis of `node`, the
    order has the number of this axis in the source. If `shared` is False, the search ends at a
    tensor that has further readers.
    """
    order: Order = list(range(len(shape_of(node))))
    first = node
    while (before := moved(node)) is not None and (shared or node is first or len(node.users) == 1):
        order = [None if axis is None else before[axis] for axis in order]
        node = cast(Node, node.args[0])
    return node, order


def moved(node: Node) -> Order | None:
    """Return the number that each axis of `node` has in the input of `node`.

    Returns None if `node` does more than move axes.
    """
    if node.target not in MOVERS:
        return None
    old, new = shape_of(node.args[0]), shape_of(node)
    if node.target is aten.permute.default:
        return [axis % len(old) for axis in cast(Sequence[int], node.args[1])]
    kept, axes = long_axes(old), long_axes(new)
    if not same_sizes([old[axis] for axis in kept], [new[axis] for axis in axes]):
        return None
    sources = dict(zip(axes, kept, strict=True))
    return [sources.get(axis) for axis in range(len(new))]


def arranged(tensor: Node, order: Order, reader: Node) -> Node:
    """Add nodes before `reader` that bring the axes of `tensor` into `order`. Return the result.

    `order` may leave out axes of size 1.
    """
    shape = shape_of(tensor)
    kept = long_axes(shape)
    wanted = [axis for axis in order if axis in kept]
    for axis in reversed(range(len(shape))):
        if axis not in kept:
            tensor = add_before(reader, aten.squeeze.dim, tensor, axis)
    if wanted != kept:
        tensor = add_before(reader, aten.permute.default, tensor, [kept.index(a) for a in wanted])
    for axis, source in enumerate(order):
        if source not in kept:
            tensor = add_before(reader, aten.unsqueeze.default, tensor, axis)
    return tensor


def long_axes(shape: Sequence[Size]) -> list[int]:
    """Return the axes whose size is not 1. A size that depends on the batch is not 1."""
    return [axis for axis, size in enumerate(shape) if not is_one(size)]


def fit_into(lengths: Sequence[Size], whole: Size) -> bool:
    """Whether all sizes are known and the sum of `lengths` is at most `whole`."""
    return is_known(*lengths, whole) and sum(lengths) <= whole


def is_one(size: Size) -> bool:
    """Whether `size` is 1 for every batch size."""
    return isinstance(size, int) and size == 1


def summands(node: Node) -> list[Node]:
    """The tensors that `node` adds up. If only `node` reads an inner sum, its summands instead."""
    tensors: list[Node] = []
    for given in cast(tuple[Node, Node], node.args):
        tensors += summands(given) if is_sum(given) and len(given.users) == 1 else [given]
    return tensors


def is_sum(node: Node) -> bool:
    """Whether `node` adds two tensors."""
    tensors = node.target is aten.add.Tensor and not node.kwargs
    return tensors and all(isinstance(given, Node) for given in node.args)


def part_of(node: Node) -> Part | None:
    """The part that `node` pads with zeros along one axis; None for other nodes."""
    if node.target is not aten.constant_pad_nd.default or any(node.args[2:]) or node.kwargs:
        return None
    tensor, pads = cast(tuple[Node, Sequence[int]], node.args[:2])
    around = list(zip(pads[::2], pads[1::2], strict=True))
    padded = [axis for axis, pair in enumerate(around) if pair != (0, 0)]
    if len(padded) != 1 or not all(isinstance(size, int) and size >= 0 for size in pads):
        return None
    axis = len(shape_of(tensor)) - 1 - padded[0]
    before, behind = around[padded[0]]
    length = shape_of(tensor)[axis]
    return Part(axis, before, length, behind, tensor) if isinstance(length, int) else None


def complete(parts: Sequence[Part]) -> bool:
    """Whether `parts`, in their order, follow each other along one axis without a gap."""
    follow = all(
        first.axis == second.axis and first.before + first.length == second.before
        for first, second in pairwise(parts)
    )
    return follow and parts[0].before == 0 and parts[-1].behind == 0
