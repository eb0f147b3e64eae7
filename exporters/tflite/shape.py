"""Lowering of operators that rearrange, slice, concatenate and pad."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from exporters.tflite.flatbuffer import Size, Tensor, open_size
from exporters.tflite.lowering import Lowering, LoweringRules, Number
from exporters.tflite.tensor_layouts import UnsupportedError, Value, product

aten = torch.ops.aten
MAX_AXES = 5
"""Largest rank of a slice or concatenation; above it, axes are merged."""
MAX_PARTS = 5
"""Most values that XNNPACK concatenates at once."""
SHORT_AXIS = 5
"""Largest axis that `flip` reverses with slices."""
PAD_AXES = 5
"""Largest rank of TFLite's PAD."""


def same(lowering: Lowering, x: Value, **options: object) -> Value:
    """Return `x`. Values never change, so a copy is not needed."""
    return x


def clone(lowering: Lowering, x: Value, memory_format: object = None) -> Value:
    """Return `x`. If the clone requires contiguous memory, the elements are in ATen's order."""
    if memory_format is torch.contiguous_format and x.stored_shape == x.shape:
        return Value.plain(lowering.dense(x))
    return x


def view(lowering: Lowering, x: Value, size: object) -> Value:
    """`x` reshaped to the node's shape."""
    return lowering.reshaped(x, lowering.shape)


def permute(lowering: Lowering, x: Value, axes: Sequence[int]) -> Value:
    """`x` with its axes in another order."""
    return x.permuted(axes)


def expand(lowering: Lowering, x: Value, size: object, **options: object) -> Value:
    """Broadcast `x` to the node's shape. New axes come first."""
    lead = len(lowering.shape) - len(x.shape)
    if lead:
        small = Value(x.tensor, x.stored_shape, x.order)
        x = lowering.reshaped(small, (*[1] * lead, *x.stored_shape))
    return x.expanded(lowering.shape)


def repeat(lowering: Lowering, x: Value, times: Sequence[int]) -> Value:
    """`x` repeated `times` along each axis.

    If a number of repetitions depends on the batch, a new axis is added before each axis and
    expanded.
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
    """Every `step`-th element of one axis, from `start` up to but not including `end`."""
    size = x.shape[axis % len(x.shape)]
    if not start and step == 1 and lowering.shape == x.shape:
        return x
    if open_size(size):
        return rows(lowering, x, axis % len(x.shape), start or 0, step)
    first, last, _ = slice(start, end, step).indices(int(size))
    return cut(lowering, x, axis, first, last, step)


def rows(lowering: Lowering, x: Value, axis: int, start: Size, step: int) -> Value:
    """Slice an axis whose size is a multiple of the batch size. The result has the node's shape."""
    if step != 1 or (isinstance(start, int) and start < 0):
        raise UnsupportedError("a slice of the batch with a step or from its end")
    first = [start if a == axis else 0 for a in range(len(x.shape))]
    ends = [lowering.sizes(sizes) for sizes in (first, lowering.shape)]
    tensor = lowering.emit("SLICE", [lowering.dense(x), *ends], lowering.shape, "SliceOptions")
    return Value.plain(tensor)


def cut(lowering: Lowering, x: Value, axis: int, first: int, last: int, step: int = 1) -> Value:
    """Every `step`-th element of one axis, from `first` up to but not including `last`."""
    x = lowering.materialized(x)
    axis %= len(x.shape)
    if step != 1 and any(map(open_size, x.tensor.shape[x.order[axis] + 1 :][:1])):
        x = Value.plain(lowering.dense(x))  # the batch is stored behind the axis
    stored, count = x.order[axis], len(range(first, last, step))
    tensor = x.tensor
    if step == 1:
        tensor = part(lowering, tensor, {stored: (first, last)})
    else:
        tensor = strided(lowering, x, axis, first, count, step)
    return Value(tensor, (*x.shape[:axis], count, *x.shape[axis + 1 :]), x.order)


def strided(lowering: Lowering, x: Value, axis: int, first: int, count: int, step: int) -> Tensor:
    """The tensor of every `step`-th element of one axis.

    XNNPACK (LiteRT's fast library) has only slices of step 1. So `step` neighbouring elements are
    merged into the next axis: (n, m) becomes (n / step, step * m). The result is a contiguous slice
    of both axes.
    """
    stored = x.order[axis]
    widths = [[0, 0] for _ in x.order]
    widths[stored][1] = -int(x.shape[axis]) % step
    tensor = padded(lowering, x, widths, 0).tensor
    sizes = [*tensor.shape, 1]
    whole, behind = int(sizes[stored]), sizes[stored + 1]
    if open_size(behind):
        raise UnsupportedError("a strided slice of the axis before the batch")
    merged = [*sizes[:stored], whole // step, step * int(behind), *sizes[stored + 2 :]]
    if stored + 1 < len(x.order):
        merged.pop()
    start, phase = divmod(first, step)
    ends = {
        stored: (start, start + count),
        stored + 1: (phase * int(behind), (phase + 1) * int(behind)),
    }
    tensor = part(lowering, lowering.reshape(tensor, merged), ends)
    return lowering.reshape(tensor, [*sizes[:stored], count, *sizes[stored + 1 : -1]])


def part(lowering: Lowering, tensor: Tensor, ends: Mapping[int, tuple[int, int]]) -> Tensor:
    """Slice axes of `tensor`. `ends` maps an axis to (first, last), and `last` is not included.

    If `tensor` has more than MAX_AXES axes and only one axis is sliced, the axes before it are
    merged into one, and the axes after it are merged into one.
    """
    rank = len(tensor.shape)
    if rank > MAX_AXES and len(ends) == 1:
        ((axis, (first, last)),) = ends.items()
        whole = tensor.shape
        flat = (product(whole[:axis]), whole[axis], product(whole[axis + 1 :]))
        taken = part(lowering, lowering.reshape(tensor, flat), {1: (first, last)})
        return lowering.reshape(taken, (*whole[:axis], last - first, *whole[axis + 1 :]))
    begins, lasts = [0] * rank, [0] * rank
    sizes = list(tensor.shape)
    for axis, (first, last) in ends.items():
        begins[axis], lasts[axis], sizes[axis] = first, last, last - first
    # The masks select whole axes: the end of an open axis is unknown here.
    others = sum(1 << axis for axis in range(rank) if axis not in ends)
    return lowering.emit(
        "STRIDED_SLICE",
        [tensor, *(lowering.integers(n) for n in (begins, lasts, [1] * rank))],
        sizes,
        "StridedSliceOptions",
        beginMask=others,
        endMask=others,
    )


def select(lowering: Lowering, x: Value, axis: int, index: int) -> Value:
    """One element of an axis. The result does not have this axis."""
    if index < 0:
        index += int(x.shape[axis])
    return lowering.reshaped(cut(lowering, x, axis, index, index + 1), lowering.shape)


def concatenate(lowering: Lowering, values: Sequence[Value], axis: int = 0) -> Value:
    """Concatenate `values` along `axis`, in the layout of the first value.

    XNNPACK (LiteRT's fast library) accepts at most MAX_PARTS values, so more values are first
    concatenated in groups.
    """
    while len(values) > MAX_PARTS:
        most = math.ceil(len(values) / math.ceil(len(values) / MAX_PARTS))
        groups = [values[first : first + most] for first in range(0, len(values), most)]
        values = [concatenate(lowering, group, axis) for group in groups]
    if len(values) == 1:
        return values[0]
    axis %= len(values[0].shape)
    order = values[0].order
    stored = order[axis]
    tensors = [lowering.dense(v, order) for v in values]
    sizes = list(tensors[0].shape)
    sizes[stored] = total([t.shape[stored] for t in tensors])
    if len(sizes) > MAX_AXES:
        ahead = product(sizes[:stored])
        behind = product(sizes[stored + 1 :])
        tensors = [lowering.reshape(t, (ahead, t.shape[stored], behind)) for t in tensors]
        joined = lowering.emit(
            "CONCATENATION", tensors, (ahead, sizes[stored], behind), "ConcatenationOptions", axis=1
        )
        tensor = lowering.reshape(joined, sizes)
    else:
        tensor = lowering.emit("CONCATENATION", tensors, sizes, "ConcatenationOptions", axis=stored)
    full = tuple(sizes[p] for p in order)
    return Value(tensor, full, order)


def total(sizes: Sequence[Size]) -> Size:
    """Return the sum of `sizes`, which are numbers or multiples of the batch size."""
    if any(map(open_size, sizes)) and not all(map(open_size, sizes)):
        raise UnsupportedError("concatenation of samples and constants along the batch")
    return sum(sizes)


def pad(lowering: Lowering, x: Value, pads: Sequence[int], number: Number = 0) -> Value:
    """Pad with `number`. `pads` are (front, behind) of the last axis, then of the second-last axis.

    Negative widths crop.
    """
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
    """Pad each axis of the tensor of `x` by its `widths` (front, behind) with `number`.

    TFLite pads at most PAD_AXES axes, so adjacent axes without padding are merged.
    """
    if not any(map(any, widths)):
        return x
    x = lowering.materialized(x)
    held = x.tensor.shape
    wide = [n + sum(w) for n, w in zip(held, widths, strict=True)]
    groups: list[list[int]] = []
    for axis, width in enumerate(widths):
        if groups and len(held) > PAD_AXES and not any(width) and not any(widths[groups[-1][-1]]):
            groups[-1].append(axis)
        else:
            groups.append([axis])
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
    shape = tuple(wide[axis] for axis in x.order)
    return Value(lowering.reshape(tensor, wide), shape, x.order)


def flip(lowering: Lowering, x: Value, axes: Sequence[int]) -> Value:
    """Reverse `x` along `axes`.

    A short axis, such as an axis of a kernel, is reversed with slices, because XNNPACK (LiteRT's
    fast library) has no REVERSE_V2.
    """
    x = lowering.materialized(x)
    for axis in axes:
        size = x.shape[axis]
        if open_size(size) or int(size) > SHORT_AXIS:
            stored = x.order[axis % len(x.order)]
            tensor = lowering.emit(
                "REVERSE_V2",
                [x.tensor, lowering.integers([stored])],
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
