"""Rules of the operators that move channels or lay them out otherwise."""

import math
import operator
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.fx import Node

from toolkit.channels.following import OPEN_SIZE, Rule, Step, Value, is_fixed, unknown, untouched
from toolkit.channels.units import Axes, Axis, Kept, fixed

aten = torch.ops.aten


def reshape(step: Step) -> Value:
    """Views and all that is one: flatten, unflatten, squeeze, unsqueeze."""
    x, after = step.axes("self"), step.sizes()
    before = tuple(map(len, x))
    if math.prod(before) != math.prod(after) or 0 in before:
        return unknown(step)
    if "squeeze" in step.node.name:
        # An axis that shrinks to size 1 would vanish with those that are meant to.
        long = [axis for axis in x if len(axis) > 1]
        step.require(lambda kept: all(kept.count(a) > 1 for a in long), "one channel would be left")
    axes: list[Axis] = []
    for sources, sizes in blocks(before, after):
        axes += regrouped(step, x[sources], sizes)
    if step.node.target in SIZED:
        step.resize(SIZED[step.node.target], resized(step, axes))
    return tuple(axes)


SIZED = {
    aten.view.default: "size",
    aten.reshape.default: "shape",
    aten._unsafe_view.default: "size",
    aten.unflatten.int: "sizes",
}


def resized(step: Step, axes: Sequence[Axis]) -> Sequence[Axis]:
    """Those of `axes` whose sizes the operator is given."""
    if step.node.target is not aten.unflatten.int:
        return axes
    (x,) = step.inputs()
    first = step.argument("dim") % len(x)
    return axes[first : first + len(step.argument("sizes"))]


def blocks(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[slice, tuple[int, ...]]]:
    """The smallest runs of axes that a reshape turns into each other: places and new sizes."""
    found = []
    i = j = 0
    while i < len(before) or j < len(after):
        start, first = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (held := math.prod(before[start:i])) != (given := math.prod(after[first:j])):
            i, j = (i + 1, j) if held < given else (i, j + 1)
        found.append((slice(start, i), after[first:j]))
    return found


def regrouped(step: Step, axes: Axes, sizes: tuple[int, ...]) -> list[Axis]:
    """Axes of `sizes` that hold what `axes` held, in the same order."""
    if len(axes) == 1 and len(sizes) == 1:
        return list(axes)
    reason = f"it turns axes of {written(map(len, axes))} into {written(sizes)}"
    free = [place for place, axis in enumerate(axes) if not is_fixed(axis, step.units)]
    long = [place for place in free if len(axes[place]) > 1]
    spread = spread_over(step, axes, long[0], sizes) if len(long) == 1 else None
    for place in free:
        if spread is None or place not in long:
            step.need(axes[place], reason)
    return spread or [fixed(size) for size in sizes]


def spread_over(step: Step, axes: Axes, channels: int, sizes: tuple[int, ...]) -> list[Axis] | None:
    """Axes of `sizes` where one of them alone tells the channel, as axis `channels` did.

    None where no axis does, or where the batch's size would have to change with the channels.
    """
    before = [len(axis) for axis in axes]
    if any(size % OPEN_SIZE == 0 for size in before):
        return None
    shape = [size if place == channels else 1 for place, size in enumerate(before)]
    alone = step.units.roots(axes[channels]).reshape(shape)
    full = np.broadcast_to(alone, before).reshape(sizes)
    for place in range(len(sizes)):
        others = tuple(i for i in range(len(sizes)) if i != place)
        alone = full.min(axis=others, keepdims=True)
        if np.array_equal(np.broadcast_to(alone, full.shape), full):
            result = [fixed(size) for size in sizes]
            result[place] = alone.reshape(-1)
            return result
    return None


def written(sizes: Iterable[int]) -> str:
    """Sizes for a person."""
    return " x ".join("batch" if size == OPEN_SIZE else str(size) for size in sizes)


def permute(step: Step) -> Value:
    """All axes in another order."""
    (x,) = step.inputs()
    return tuple(x[place] for place in step.argument("dims"))


def transpose(step: Step) -> Value:
    """Two axes change places."""
    axes = list(step.inputs()[0])
    one, other = step.argument("dim0"), step.argument("dim1")
    axes[one], axes[other] = axes[other], axes[one]
    return tuple(axes)


def reverse(step: Step) -> Value:
    """The transpose of a matrix."""
    return step.inputs()[0][::-1]


def expand(step: Step) -> Value:
    """Axes of size 1 are repeated: what they become, other operands say."""
    (x,) = step.inputs()
    sizes = step.sizes()
    axes = [fixed(1)] * (len(sizes) - len(x)) + list(x)
    grown = tuple(
        axis
        if len(axis) == size
        else (fixed(size) if size == OPEN_SIZE else step.units.fresh(size))
        for axis, size in zip(axes, sizes, strict=True)
    )
    step.resize("size", grown)
    return grown


def cat(step: Step) -> Value:
    """One axis is lined up, the others are the same."""
    tensors = [step.of(node) for node in step.argument("tensors")]
    place = step.argument("dim") % len(tensors[0])
    for tensor in tensors[1:]:
        for i, (one, other) in enumerate(zip(tensors[0], tensor, strict=True)):
            if i != place:
                step.units.join(one, other)
    lined = np.concatenate([tensor[place] for tensor in tensors])
    return tuple(lined if i == place else axis for i, axis in enumerate(tensors[0]))


def split(step: Step) -> Value:
    """One axis is cut into pieces, whose channels are counted apart."""
    (x,) = step.inputs()
    place = step.argument("dim") % len(x)
    recorded = untouched(step.node.meta["val"])
    assert isinstance(recorded, list)
    bounds = np.cumsum([len(axes[place]) for axes in recorded])[:-1]
    pieces = np.split(x[place], bounds)
    for piece in pieces:
        step.units.bound(piece)

    def apply(kept: Kept) -> None:
        if not kept.all(x[place]):
            step.node.target = aten.split_with_sizes.default
            step.node.args = (step.node.args[0], [kept.count(p) for p in pieces], place)
            step.node.kwargs = {}

    step.followed.edits.append(apply)
    return [tuple(p if i == place else axis for i, axis in enumerate(x)) for p in pieces]


def getitem(step: Step) -> Value:
    """One of an operator's results."""
    source, place = step.node.args
    results = step.known[source]  # type: ignore[index]
    return results[place] if isinstance(results, list) else results  # type: ignore[index]


def is_getitem(node: Node) -> bool:
    """Whether `node` picks one of several results."""
    return node.target is operator.getitem


def glu(step: Step) -> Value:
    """One half of an axis gates the other."""
    (x,) = step.inputs()
    place = step.argument("dim") % len(x)
    half, gate = np.split(x[place], 2)
    step.units.join(half, gate)
    return tuple(half if i == place else axis for i, axis in enumerate(x))


def pad(step: Step) -> Value:
    """Constants beside channels are channels too; other padding wants all of its axis."""
    (x,) = step.inputs()
    amounts, axes = list(step.argument("pad")), list(x)
    constant = step.node.target is aten.constant_pad_nd.default or (
        step.node.target is aten.pad.default and step.argument("mode") == "constant"
    )
    margins: list[Axis | int] = []
    for number in range(len(amounts) // 2):
        place, (left, right) = len(x) - 1 - number, amounts[2 * number : 2 * number + 2]
        if constant and left >= 0 and right >= 0 and not is_fixed(x[place], step.units):
            beside = step.units.fresh(left), step.units.fresh(right)
            axes[place] = np.concatenate([beside[0], x[place], beside[1]])
            margins += beside
        else:
            if left or right:
                step.need(x[place], "it pads them")
                axes[place] = fixed(step.sizes()[place])
            margins += [left, right]
    if constant:
        step.edit("pad", lambda kept: [m if isinstance(m, int) else kept.count(m) for m in margins])
    return tuple(axes)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
        reshape,
    ),
    "permute": permute,
    "transpose": transpose,
    "t": reverse,
    "numpy_T": reverse,
    "expand": expand,
    "cat": cat,
    "concat": cat,
    "split": split,
    "split_with_sizes": split,
    "chunk": split,
    "glu": glu,
    "pad": pad,
    "constant_pad_nd": pad,
}
