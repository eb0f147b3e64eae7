"""Operators that move, cut and join elements."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from exporters.tflite.flatbuffer import Size, Tensor, open_size
from exporters.tflite.lowering import Lowering, LoweringRules, Number
from exporters.tflite.values import UnsupportedError, Value, product

aten = torch.ops.aten
FARTHEST = 2**31 - 1
FEW = 5
"""As many parts and axes as are handled as they are."""
PAD_AXES = 5
"""As many axes as TFLite pads."""


def same(lowering: Lowering, x: Value, **options: object) -> Value:
    """`x` itself: values never change, so that a copy is not needed."""
    return x


def clone(lowering: Lowering, x: Value, memory_format: object = None) -> Value:
    """`x` itself, with its elements in order where that is asked for."""
    if memory_format is torch.contiguous_format and x.held == x.shape:
        return Value.plain(lowering.dense(x))
    return x


def view(lowering: Lowering, x: Value, size: object) -> Value:
    """`x` in the node's shape."""
    return lowering.reshaped(x, lowering.shape)


def permute(lowering: Lowering, x: Value, axes: Sequence[int]) -> Value:
    """`x` with its axes in another order."""
    return x.permuted(axes)


def expand(lowering: Lowering, x: Value, size: object, **options: object) -> Value:
    """`x` repeated to the node's shape, new axes first."""
    lead = len(lowering.shape) - len(x.shape)
    if lead:
        small = Value(x.tensor, x.held, x.order)
        x = lowering.reshaped(small, (*[1] * lead, *x.held))
    return x.expanded(lowering.shape)


def repeat(lowering: Lowering, x: Value, times: Sequence[int]) -> Value:
    """`x` side by side with itself, `times` along each axis; as often as the batch says by
    expanding a new axis ahead.
    """
    whole = lowering.shape
    lead = (*[1] * (len(times) - len(x.shape)), *x.shape)
    if any(map(open_size, times)):
        new = lowering.reshaped(x, [n for size in lead for n in (1, size)])
        pairs = [n for pair in zip(times, lead, strict=True) for n in pair]
        return lowering.reshaped(new.expanded(pairs), whole)
    dense = lowering.dense(lowering.reshaped(x, lead))
    tensor = lowering.emit(
        "TILE", [dense, lowering.integers([int(n) for n in times])], lowering.shape, "TileOptions"
    )
    return Value.plain(tensor)


def slice_(
    lowering: Lowering,
    x: Value,
    axis: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    """Every `step`-th element of one axis from `start` to ahead of `end`."""
    size = x.shape[axis % len(x.shape)]
    if not start and step == 1 and lowering.shape == x.shape:
        return x
    if open_size(size):
        raise UnsupportedError("a part of the batch")
    first, last, _ = slice(start, end, step).indices(int(size))
    return cut(lowering, x, axis, first, last, step)


def cut(lowering: Lowering, x: Value, axis: int, first: int, last: int, step: int = 1) -> Value:
    """Every `step`-th element of one axis from `first` to ahead of `last`."""
    x = lowering.full(x)
    axis %= len(x.shape)
    place, count = x.order[axis], len(range(first, last, step))
    tensor = x.tensor
    if step == 1:
        tensor = part(lowering, tensor, {place: (first, last)})
    else:
        tensor = strided(lowering, x, axis, first, count, step)
    return Value(tensor, (*x.shape[:axis], count, *x.shape[axis + 1 :]), x.order)


def strided(lowering: Lowering, x: Value, axis: int, first: int, count: int, step: int) -> Tensor:
    """The tensor of every `step`-th element of one axis.

    `step` neighbours become one, `step` times as wide in the axis behind, so that a plain part
    remains to be taken: XNNPACK has no other.
    """
    place = x.order[axis]
    widths = [[0, 0] for _ in x.order]
    widths[place][1] = -int(x.shape[axis]) % step
    tensor = padded(lowering, x, widths, 0).tensor
    sizes = [*tensor.shape, 1]
    whole, behind = int(sizes[place]), sizes[place + 1]
    if open_size(behind):
        raise UnsupportedError("a strided part ahead of the batch")
    merged = [*sizes[:place], whole // step, step * int(behind), *sizes[place + 2 :]]
    if place + 1 < len(x.order):
        merged.pop()
    start, phase = divmod(first, step)
    ends = {
        place: (start, start + count),
        place + 1: (phase * int(behind), (phase + 1) * int(behind)),
    }
    tensor = part(lowering, lowering.reshape(tensor, merged), ends)
    return lowering.reshape(tensor, [*sizes[:place], count, *sizes[place + 1 : -1]])


def part(lowering: Lowering, tensor: Tensor, ends: Mapping[int, tuple[int, int]]) -> Tensor:
    """From the first to ahead of the last element along some axes; others go together."""
    rank = len(tensor.shape)
    if rank > FEW and len(ends) == 1:
        ((place, (first, last)),) = ends.items()
        whole = tensor.shape
        flat = (product(whole[:place]), whole[place], product(whole[place + 1 :]))
        taken = part(lowering, lowering.reshape(tensor, flat), {1: (first, last)})
        return lowering.reshape(taken, (*whole[:place], last - first, *whole[place + 1 :]))
    begins, lasts = [0] * rank, [0] * rank
    sizes = list(tensor.shape)
    for place, (first, last) in ends.items():
        begins[place], lasts[place], sizes[place] = first, last, last - first
    others = sum(1 << place for place in range(rank) if place not in ends)
    return lowering.emit(
        "STRIDED_SLICE",
        [tensor, *(lowering.integers(n) for n in (begins, lasts, [1] * rank))],
        sizes,
        "StridedSliceOptions",
        beginMask=others,
        endMask=others,
    )


def select(lowering: Lowering, x: Value, axis: int, index: int) -> Value:
    """One element of an axis, which goes."""
    size = int(x.shape[axis])
    return lowering.reshaped(cut(lowering, x, axis, index % size, index % size + 1), lowering.shape)


def concatenate(lowering: Lowering, values: Sequence[Value], axis: int = 0) -> Value:
    """Values one after the other along `axis`, in the first one's layout."""
    if len(values) == 1:
        return values[0]
    axis %= len(values[0].shape)
    order = values[0].order
    place = order[axis]
    tensors = [lowering.dense(v, order) for v in values]
    sizes = list(tensors[0].shape)
    sizes[place] = total([t.shape[place] for t in tensors])
    if len(sizes) > FEW:
        ahead = product(sizes[:place])
        behind = product(sizes[place + 1 :])
        tensors = [lowering.reshape(t, (ahead, t.shape[place], behind)) for t in tensors]
        made = lowering.emit(
            "CONCATENATION", tensors, (ahead, sizes[place], behind), "ConcatenationOptions", axis=1
        )
        tensor = lowering.reshape(made, sizes)
    else:
        tensor = lowering.emit("CONCATENATION", tensors, sizes, "ConcatenationOptions", axis=place)
    full = tuple(sizes[p] for p in order)
    return Value(tensor, full, order)


def total(sizes: Sequence[Size]) -> Size:
    """Sum of sizes."""
    if any(map(open_size, sizes)):
        raise UnsupportedError("concatenation along the batch")
    return sum(int(n) for n in sizes)


def pad(lowering: Lowering, x: Value, pads: Sequence[int], number: Number = 0) -> Value:
    """`number` around the last axes, (front, behind) from the last one on; negative ones cut."""
    rank = len(x.shape)
    ends = {rank - 1 - n // 2: (pads[n], pads[n + 1]) for n in range(0, len(pads), 2)}
    for axis, (front, behind) in ends.items():
        if front < 0 or behind < 0:
            size = int(x.shape[axis])
            first, last = max(-front, 0), size - max(-behind, 0)
            x = cut(lowering, x, axis, first, last)
    widths = [[0, 0] for _ in range(rank)]
    for axis, (front, behind) in ends.items():
        widths[x.order[axis]] = [max(front, 0), max(behind, 0)]
    return padded(lowering, x, widths, number)


def padded(lowering: Lowering, x: Value, widths: Sequence[Sequence[int]], number: Number) -> Value:
    """`x` with `widths` (front, behind) of `number` around the axes of its tensor.

    Neighbours that are not padded go together as one axis: TFLite pads five at most.
    """
    if not any(map(any, widths)):
        return x
    x = lowering.full(x)
    held = x.tensor.shape
    wide = [n + sum(w) for n, w in zip(held, widths, strict=True)]
    groups: list[list[int]] = []
    for place, width in enumerate(widths):
        if groups and len(held) > PAD_AXES and not any(width) and not any(widths[groups[-1][-1]]):
            groups[-1].append(place)
        else:
            groups.append([place])
    merged = lowering.reshape(x.tensor, [product([held[p] for p in g]) for g in groups])
    table = np.asarray([widths[g[0]] for g in groups], np.int32)
    inputs = [merged, lowering.graph.constant(table)]
    if number:
        inputs.append(lowering.graph.constant(np.asarray([number], merged.dtype)))
    tensor = lowering.emit(
        "PADV2" if number else "PAD",
        inputs,
        [product([wide[p] for p in g]) for g in groups],
        "PadV2Options" if number else "PadOptions",
    )
    shape = tuple(wide[place] for place in x.order)
    return Value(lowering.reshape(tensor, wide), shape, x.order)


def flip(lowering: Lowering, x: Value, axes: Sequence[int]) -> Value:
    """`x` backwards along `axes`, one after the other; a short axis, as a kernel's, by its parts.

    XNNPACK takes those, but no REVERSE_V2.
    """
    x = lowering.full(x)
    for axis in axes:
        size = x.shape[axis]
        if open_size(size) or int(size) > FEW:
            place = x.order[axis % len(x.order)]
            tensor = lowering.emit(
                "REVERSE_V2",
                [x.tensor, lowering.integers([place])],
                x.tensor.shape,
                "ReverseV2Options",
            )
            x = Value(tensor, x.shape, x.order)
        elif size != 1:
            parts = [cut(lowering, x, axis, n, n + 1) for n in reversed(range(int(size)))]
            x = concatenate(lowering, parts, axis)
    return x


FORMS: LoweringRules = {
    aten.clone.default: clone,
    aten.alias.default: same,
    aten.detach.default: same,
    aten.lift_fresh_copy.default: same,
    aten.view.default: view,
    aten._unsafe_view.default: view,
    aten.reshape.default: view,
    aten.unsqueeze.default: view,
    aten.squeeze.dim: view,
    aten.permute.default: permute,
    aten.t.default: lambda lowering, x: x.permuted(range(len(x.shape))[::-1]),
    aten.expand.default: expand,
    aten.repeat.default: repeat,
    aten.slice.Tensor: slice_,
    aten.select.int: select,
    aten.cat.default: concatenate,
    aten.constant_pad_nd.default: pad,
    aten.flip.default: flip,
}
