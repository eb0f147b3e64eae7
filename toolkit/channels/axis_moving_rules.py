"""Rules for operators that move, concatenate, split or pad axes."""

import numpy as np
import torch
from torch.fx import Node

from toolkit.channels.channel_units import Axis, Kept, fixed_axis
from toolkit.channels.operator_call import (
    OPEN_SIZE,
    Rule,
    Step,
    Value,
    fixed_axes,
    is_fixed,
    require_unchanged,
)

aten = torch.ops.aten


def permute(step: Step) -> Value:
    """Reorder all axes."""
    (x,) = step.inputs()
    return tuple(x[dim] for dim in step.argument("dims"))


def transpose(step: Step) -> Value:
    """Swap two axes."""
    axes = list(step.inputs()[0])
    first, second = step.argument("dim0"), step.argument("dim1")
    axes[first], axes[second] = axes[second], axes[first]
    return tuple(axes)


def reverse(step: Step) -> Value:
    """Transpose a matrix."""
    return step.inputs()[0][::-1]


def expand(step: Step) -> Value:
    """Repeat axes of size 1.

    The new axes get the channels of the tensors with which the result is combined later.
    """
    (x,) = step.inputs()
    sizes = step.sizes()
    axes = [fixed_axis(1)] * (len(sizes) - len(x)) + list(x)
    grown = tuple(
        axis if len(axis) == size else step.units.new_repeated_axis(size)
        for axis, size in zip(axes, sizes, strict=True)
    )
    step.resize("size", grown)
    return grown


def expand_as(step: Step) -> Value:
    """Repeat axes of size 1 to the sizes of another tensor."""
    x, other = step.axes("self"), step.axes("other")
    for axis, like in zip(x[::-1], other[::-1], strict=False):
        if len(axis) == len(like):
            step.units.join(axis, like)
    return other


def filled(step: Step) -> Value:
    """A tensor filled with one number.

    Its axes get the channels of the tensors with which it is combined later.
    """
    axes = tuple(map(step.units.new_axis, step.sizes()))
    step.resize("size", axes)
    return axes


def cat(step: Step) -> Value:
    """Concatenate along one axis; the other axes have the same channels in all tensors."""
    tensors = [step.of(node) for node in step.argument("tensors")]
    dim = step.argument("dim") % len(tensors[0])
    for tensor in tensors[1:]:
        for i, (left, right) in enumerate(zip(tensors[0], tensor, strict=True)):
            if i != dim:
                step.units.join(left, right)
    concatenated = np.concatenate([tensor[dim] for tensor in tensors])
    return tuple(concatenated if i == dim else axis for i, axis in enumerate(tensors[0]))


def split(step: Step) -> Value:
    """Split one axis into pieces. Each piece keeps its own share of channels."""
    (x,) = step.inputs()
    dim = step.argument("dim") % len(x)
    recorded = fixed_axes(step.node.meta["val"])
    assert isinstance(recorded, list)
    bounds = np.cumsum([len(axes[dim]) for axes in recorded])[:-1]
    pieces = np.split(x[dim], bounds)
    for piece in pieces:
        step.units.add_boundary(piece)

    def apply(kept: Kept) -> None:
        if not kept.all(x[dim]):
            # After dropping, the pieces may have unequal sizes, which chunk cannot express.
            step.node.target = aten.split_with_sizes.default
            step.node.args = (step.node.args[0], [kept.count(p) for p in pieces], dim)
            step.node.kwargs = {}

    step.tracked.edits.append(apply)
    return [tuple(p if i == dim else axis for i, axis in enumerate(x)) for p in pieces]


def unbind(step: Step) -> Value:
    """Turn every index of one axis into a separate tensor. The axis must be kept whole."""
    (x,) = step.inputs()
    dim = step.argument("dim") % len(x)
    step.require_all(x[dim], "it selects one of them")
    return [(*x[:dim], *x[dim + 1 :])] * len(x[dim])


def stack(step: Step) -> Value:
    """Join tensors along a new axis; the other axes have the same channels in all tensors."""
    first, *others = (step.of(node) for node in step.argument("tensors"))
    for tensor in others:
        for left, right in zip(first, tensor, strict=True):
            step.units.join(left, right)
    dim = step.argument("dim") % (len(first) + 1)
    return (*first[:dim], fixed_axis(len(others) + 1), *first[dim:])


def piece(step: Step) -> Value:
    """Take a range of one axis.

    The ratio of kept channels applies separately to the channels inside and outside the range.
    """
    (x,) = step.inputs()
    dim = step.argument("dim") % len(x)
    axis, size = x[dim], step.sizes()[dim]
    if size == len(axis):
        return x
    start, stop = step.argument("start") or 0, step.argument("end")
    if step.argument("step") != 1 or not isinstance(start, int) or len(axis) >= OPEN_SIZE:
        step.require_all(axis, "it selects some of them")
        return (*x[:dim], fixed_axis(size), *x[dim + 1 :])
    start = start % len(axis)
    before, inside = axis[:start], axis[start : start + size]
    step.units.add_boundary(inside)
    if not isinstance(stop, Node):
        step.edit("start", lambda kept: kept.count(before))
        step.edit("end", lambda kept: kept.count(before) + kept.count(inside))
    return (*x[:dim], inside, *x[dim + 1 :])


def repeat(step: Step) -> Value:
    """Repeat a tensor along its axes; `repeats` gives the number of times for each axis."""
    (x,) = step.inputs()
    sizes = step.sizes()
    axes = [fixed_axis(1)] * (len(sizes) - len(x)) + list(x)
    return tuple(
        fixed_axis(size) if is_fixed(axis, step.units) else np.resize(axis, size)
        for axis, size in zip(axes, sizes, strict=True)
    )


def repeat_each(step: Step) -> Value:
    """Repeat every index of an axis."""
    (x,) = step.inputs()
    if step.argument("dim") is None:
        return require_unchanged(step)
    dim = step.argument("dim") % len(x)
    times = step.argument("repeats")
    return tuple(np.repeat(a, times) if i == dim else a for i, a in enumerate(x))


def index(step: Step) -> Value:
    """Choose entries of one axis by a tensor of indices. The axis must be kept whole."""
    x = step.axes("self")
    given = list(step.argument("indices"))
    indexed = [dim for dim, indices in enumerate(given) if indices is not None]
    if len(indexed) != 1:
        return require_unchanged(step)
    (dim,) = indexed
    step.require_all(x[dim], "it selects some of them")
    chosen = step.of(given[dim])
    return (*x[:dim], *(fixed_axis(len(axis)) for axis in chosen), *x[dim + 1 :])


def index_select(step: Step) -> Value:
    """Choose entries of one axis, which must be kept whole."""
    x, dim = step.axes("self"), step.argument("dim") % len(step.axes("self"))
    step.require_all(x[dim], "it selects some of them")
    return (*x[:dim], fixed_axis(step.sizes()[dim]), *x[dim + 1 :])


def getitem(step: Step) -> Value:
    """Take one of the several results of an operator."""
    source, number = step.node.args
    results = step.known[source]  # type: ignore[index]
    return results[number] if isinstance(results, list) else results  # type: ignore[index]


def glu(step: Step) -> Value:
    """Gate one half of an axis with the other, so that both halves have the same channels."""
    (x,) = step.inputs()
    dim = step.argument("dim") % len(x)
    half, gate = np.split(x[dim], 2)
    step.units.join(half, gate)
    return tuple(half if i == dim else axis for i, axis in enumerate(x))


def pad(step: Step) -> Value:
    """Pad axes.

    Constants that are added next to channels become channels too. Padding with other values needs
    the whole axis.
    """
    (x,) = step.inputs()
    amounts, axes = list(step.argument("pad")), list(x)
    constant = step.node.target is aten.constant_pad_nd.default or (
        step.node.target is aten.pad.default and step.argument("mode") == "constant"
    )
    margins: list[Axis | int] = []
    for number in range(len(amounts) // 2):
        dim, (left, right) = len(x) - 1 - number, amounts[2 * number : 2 * number + 2]
        # Padding that reflects or repeats values depends on which channels are neighbours.
        if constant and left >= 0 and right >= 0 and not is_fixed(x[dim], step.units):
            added = step.units.new_axis(left), step.units.new_axis(right)
            axes[dim] = np.concatenate([added[0], x[dim], added[1]])
            margins += added
        else:
            if left or right:
                step.require_all(x[dim], "it pads them")
                axes[dim] = fixed_axis(step.sizes()[dim])
            margins += [left, right]
    if constant:
        step.edit("pad", lambda kept: [m if isinstance(m, int) else kept.count(m) for m in margins])
    return tuple(axes)


RULES: dict[str, Rule] = {
    "permute": permute,
    "transpose": transpose,
    "t": reverse,
    "numpy_T": reverse,
    "expand": expand,
    "expand_as": expand_as,
    **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full"), filled),
    "cat": cat,
    "concat": cat,
    "split": split,
    "split_with_sizes": split,
    "chunk": split,
    "glu": glu,
    "unbind": unbind,
    "stack": stack,
    "slice": piece,
    "repeat": repeat,
    "repeat_interleave": repeat_each,
    "index": index,
    "index_select": index_select,
    "pad": pad,
    "constant_pad_nd": pad,
}
