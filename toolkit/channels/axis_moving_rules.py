"""Rules for operators that move, concatenate, split or pad axes."""

import numpy as np
import torch

from toolkit.channels.channel_units import Axis, Kept, fixed_axis
from toolkit.channels.operator_call import Rule, Step, Value, fixed_axes, is_fixed

aten = torch.ops.aten


def permute(step: Step) -> Value:
    """Reorder all axes."""
    (x,) = step.inputs()
    return tuple(x[place] for place in step.argument("dims"))


def transpose(step: Step) -> Value:
    """Swap two axes."""
    axes = list(step.inputs()[0])
    one, other = step.argument("dim0"), step.argument("dim1")
    axes[one], axes[other] = axes[other], axes[one]
    return tuple(axes)


def reverse(step: Step) -> Value:
    """Transpose a matrix."""
    return step.inputs()[0][::-1]


def expand(step: Step) -> Value:
    """Repeat axes of size 1. Later operands say which channels the new axes have."""
    (x,) = step.inputs()
    sizes = step.sizes()
    axes = [fixed_axis(1)] * (len(sizes) - len(x)) + list(x)
    grown = tuple(
        axis if len(axis) == size else step.units.new_axis(size)
        for axis, size in zip(axes, sizes, strict=True)
    )
    step.resize("size", grown)
    return grown


def filled(step: Step) -> Value:
    """A tensor filled with one number. Later operands say which channels its axes have."""
    axes = tuple(map(step.units.new_axis, step.sizes()))
    step.resize("size", axes)
    return axes


def cat(step: Step) -> Value:
    """Concatenate along one axis; the other axes have the same channels in all tensors."""
    tensors = [step.of(node) for node in step.argument("tensors")]
    place = step.argument("dim") % len(tensors[0])
    for tensor in tensors[1:]:
        for i, (one, other) in enumerate(zip(tensors[0], tensor, strict=True)):
            if i != place:
                step.units.join(one, other)
    concatenated = np.concatenate([tensor[place] for tensor in tensors])
    return tuple(concatenated if i == place else axis for i, axis in enumerate(tensors[0]))


def split(step: Step) -> Value:
    """Split one axis into pieces. Each piece keeps its own share of channels."""
    (x,) = step.inputs()
    place = step.argument("dim") % len(x)
    recorded = fixed_axes(step.node.meta["val"])
    assert isinstance(recorded, list)
    bounds = np.cumsum([len(axes[place]) for axes in recorded])[:-1]
    pieces = np.split(x[place], bounds)
    for piece in pieces:
        step.units.add_boundary(piece)

    def apply(kept: Kept) -> None:
        if not kept.all(x[place]):
            # After dropping, the pieces may have unequal sizes, which chunk cannot express.
            step.node.target = aten.split_with_sizes.default
            step.node.args = (step.node.args[0], [kept.count(p) for p in pieces], place)
            step.node.kwargs = {}

    step.tracked.edits.append(apply)
    return [tuple(p if i == place else axis for i, axis in enumerate(x)) for p in pieces]


def getitem(step: Step) -> Value:
    """One of several results of an operator."""
    source, place = step.node.args
    results = step.known[source]  # type: ignore[index]
    return results[place] if isinstance(results, list) else results  # type: ignore[index]


def glu(step: Step) -> Value:
    """Gate one half of an axis with the other, so that both halves have the same channels."""
    (x,) = step.inputs()
    place = step.argument("dim") % len(x)
    half, gate = np.split(x[place], 2)
    step.units.join(half, gate)
    return tuple(half if i == place else axis for i, axis in enumerate(x))


def pad(step: Step) -> Value:
    """Pad axes. Constants next to channels are channels too; other padding needs the whole axis."""
    (x,) = step.inputs()
    amounts, axes = list(step.argument("pad")), list(x)
    constant = step.node.target is aten.constant_pad_nd.default or (
        step.node.target is aten.pad.default and step.argument("mode") == "constant"
    )
    margins: list[Axis | int] = []
    for number in range(len(amounts) // 2):
        place, (left, right) = len(x) - 1 - number, amounts[2 * number : 2 * number + 2]
        # Padding that reflects or repeats values depends on which channels are neighbours.
        if constant and left >= 0 and right >= 0 and not is_fixed(x[place], step.units):
            added = step.units.new_axis(left), step.units.new_axis(right)
            axes[place] = np.concatenate([added[0], x[place], added[1]])
            margins += added
        else:
            if left or right:
                step.require_all(x[place], "it pads them")
                axes[place] = fixed_axis(step.sizes()[place])
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
    **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full"), filled),
    "cat": cat,
    "concat": cat,
    "split": split,
    "split_with_sizes": split,
    "chunk": split,
    "glu": glu,
    "pad": pad,
    "constant_pad_nd": pad,
}
