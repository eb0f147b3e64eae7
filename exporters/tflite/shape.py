"""Operators that move, cut and join elements, and sums over axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from exporters.tflite.elementwise import ADD, Single, broadcast, cast
from exporters.tflite.flatbuffer import Size, Tensor, open_size
from exporters.tflite.lowering import Forms, Lowering, Number
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


def reduction(code: str) -> Single:
    """A sum, mean or extreme over some axes (default: all)."""

    def form(
        lowering: Lowering,
        x: Value,
        axes: Sequence[int] | int | None = None,
        keep: bool = False,
        **options: object,
    ) -> Value:
        rank = len(x.shape)
        axes = [axes] if isinstance(axes, int) else axes
        gone = [a % rank for a in axes] if axes else list(range(rank))
        x = lowering.full(cast(lowering, x) if code in ("SUM", "MEAN") else x)
        if not rank:
            return x
        places = sorted(x.order[a] for a in gone)
        if code in ("SUM", "MEAN"):
            x = Value(shortened(lowering, code, x.tensor, places[1:]), x.shape, x.order)
        shape = [1 if p in places else n for p, n in enumerate(x.tensor.shape)]
        order = x.order
        if not keep:
            left = [x.order[a] for a in range(rank) if a not in gone]
            order = tuple(sorted(left).index(p) for p in left)
            shape = [n for p, n in enumerate(x.tensor.shape) if p not in places]
        tensor = lowering.emit(
            code, [x.tensor, lowering.integers(places)], shape, "ReducerOptions", keepDims=keep
        )
        return Value(tensor, tuple(shape[p] for p in order), order)

    return form


def shortened(lowering: Lowering, code: str, tensor: Tensor, places: Sequence[int]) -> Tensor:
    """Sums or means over one axis after the other, from the last on, each left at size one.

    XNNPACK adds up all numbers of a sum in turn, and what it has so far is rounded every time: over
    all places of a batch that is as much as flips ten ReLUs of a ResNet-20's six million.
    """
    for place in reversed(places):
        sizes = [1 if axis == place else size for axis, size in enumerate(tensor.shape)]
        axes = lowering.integers([place])
        tensor = lowering.emit(code, [tensor, axes], sizes, "ReducerOptions", keepDims=True)
    return tensor


def over_last(code: str, options: str, **settings: Any) -> Single:
    """An operator over one axis that TFLite knows for the last axis only."""

    def form(lowering: Lowering, x: Value, axis: int, half: bool = False) -> Value:
        rank = len(x.shape)
        axes = [a for a in range(rank) if a != axis % rank] + [axis % rank]
        tensor = lowering.dense(x.permuted(axes))
        done = Value.plain(lowering.emit(code, [tensor], tensor.shape, options, **settings))
        return done.permuted([axes.index(a) for a in range(rank)])

    return form


def embedding(lowering: Lowering, weight: Value, indices: Value, *options: Any) -> Value:
    """Rows of a table."""
    tensor = lowering.emit(
        "GATHER",
        [lowering.dense(weight), lowering.dense(indices)],
        lowering.shape,
        "GatherOptions",
        axis=0,
    )
    return Value.plain(tensor)


def index(lowering: Lowering, x: Value, indices: Sequence[Value | None]) -> Value:
    """Elements of neighbouring axes that the `indices` of those axes name."""
    axes = [axis for axis, given in enumerate(indices) if given is not None]
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise UnsupportedError("indices of axes that are apart")
    others = [axis for axis in range(len(x.shape)) if axis not in axes]
    dense = lowering.dense(x.permuted([*axes, *others]))
    given = [value for value in indices if value is not None]
    shape = broadcast([v.shape for v in given], max(len(v.shape) for v in given))
    places = coordinates(lowering, given, shape)
    found = Value.plain(
        lowering.emit(
            "GATHER_ND",
            [dense, places],
            (*shape, *(x.shape[a] for a in others)),
            "GatherNdOptions",
        )
    )
    ahead = [len(shape) + n for n in range(axes[0])]
    behind = [n for n in range(len(shape) + len(others)) if n not in ahead]
    return found.permuted([*ahead, *behind])


def coordinates(lowering: Lowering, indices: Sequence[Value], shape: tuple[Size, ...]) -> Tensor:
    """The indices of each place of `shape` side by side."""
    parts = []
    for value in indices:
        small = Value(value.tensor, value.held, value.order)
        lead = len(shape) - len(small.shape)
        whole = lowering.reshaped(small, (*[1] * lead, *small.shape)).expanded(shape)
        parts.append(lowering.reshape(lowering.dense(whole), (*shape, 1)))
    if len(parts) == 1:
        return parts[0]
    return lowering.emit(
        "CONCATENATION",
        parts,
        (*shape, len(parts)),
        "ConcatenationOptions",
        axis=len(shape),
    )


def index_put(
    lowering: Lowering,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    """`x` with `values` added where the `indices` of neighbouring axes say."""
    axes = [axis for axis, given in enumerate(indices) if given is not None]
    if not accumulate or axes != list(range(axes[0], axes[-1] + 1)):
        raise UnsupportedError("index_put that replaces, or of axes that are apart")
    given = [value for value in indices if value is not None]
    others = [axis for axis in range(len(x.shape)) if axis not in axes]
    order = [*axes, *others]
    shape = broadcast([v.shape for v in given], max(len(v.shape) for v in given))
    places = lowering.emit(
        "CAST",
        [coordinates(lowering, given, shape)],
        (*shape, len(given)),
        "CastOptions",
        "int32",
    )
    rest = tuple(x.shape[axis] for axis in others)
    target = (*(x.shape[axis] for axis in axes), *rest)
    # Values stand where `index` would have put them: the axes ahead of the indexed ones first.
    full_shape = (*rest[: axes[0]], *shape, *rest[axes[0] :])
    lead = len(full_shape) - len(values.shape)
    small = Value(values.tensor, values.held, values.order)
    whole = lowering.reshaped(small, (*[1] * lead, *small.shape)).expanded(full_shape)
    inner = list(range(axes[0], axes[0] + len(shape)))
    whole = whole.permuted([*inner, *(n for n in range(len(full_shape)) if n not in inner)])
    added = lowering.emit(
        "SCATTER_ND",
        [places, lowering.dense(whole), lowering.sizes(target)],
        target,
        "ScatterNdOptions",
        values.tensor.dtype,
    )
    return ADD(
        lowering, x, Value.plain(added).permuted([order.index(n) for n in range(len(order))])
    )


def index_select(lowering: Lowering, x: Value, axis: int, indices: Value) -> Value:
    """Elements of one axis that `indices` names."""
    axis %= len(x.shape)
    return index(lowering, x, [*[None] * axis, indices])


def cumsum(lowering: Lowering, x: Value, axis: int, **options: object) -> Value:
    """Sums of all elements so far along one axis."""
    tensor = lowering.dense(x)
    place = lowering.graph.constant(np.asarray(axis % len(x.shape), np.int32))
    return Value.plain(lowering.emit("CUMSUM", [tensor, place], tensor.shape, "CumsumOptions"))


SUM = reduction("SUM")

FORMS: Forms = {
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
    aten.sum.dim_IntList: SUM,
    aten.sum.default: SUM,
    aten.mean.dim: reduction("MEAN"),
    aten.mean.default: reduction("MEAN"),
    aten.amax.default: reduction("REDUCE_MAX"),
    aten.amin.default: reduction("REDUCE_MIN"),
    aten._log_softmax.default: over_last("LOG_SOFTMAX", "LogSoftmaxOptions"),
    aten._softmax.default: over_last("SOFTMAX", "SoftmaxOptions", beta=1.0),
    aten.any.default: reduction("REDUCE_ANY"),
    aten.any.dim: reduction("REDUCE_ANY"),
    aten.any.dims: reduction("REDUCE_ANY"),
    aten.embedding.default: embedding,
    aten.index.Tensor: index,
    aten.index_select.default: index_select,
    aten.index_put.default: index_put,
    aten.cumsum.default: cumsum,
}
