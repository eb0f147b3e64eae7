"""Lowering of operators that read or update elements at positions given by index tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from exporters.tflite.elementwise import ADD, apply, broadcast, where
from exporters.tflite.flatbuffer import Size, Tensor
from exporters.tflite.lowering import Lowering, LoweringRules
from exporters.tflite.tensor_layouts import Value

aten = torch.ops.aten


def embedding(lowering: Lowering, weight: Value, indices: Value, *options: Any) -> Value:
    """The rows `indices` of the table `weight`."""
    tensor = lowering.emit(
        "GATHER",
        [lowering.dense(weight), lowering.dense(indices)],
        lowering.shape,
        "GatherOptions",
        axis=0,
    )
    return Value.plain(tensor)


def index(lowering: Lowering, x: Value, indices: Sequence[Value | None]) -> Value:
    """ATen's indexing with index tensors. None selects a whole axis."""
    axes = [axis for axis, given in enumerate(indices) if given is not None]
    others = [axis for axis in range(len(x.shape)) if axis not in axes]
    dense = lowering.dense(x.permuted([*axes, *others]))
    given = [value for value in indices if value is not None]
    shape = broadcast([v.shape for v in given], max(len(v.shape) for v in given))
    positions = coordinates(lowering, given, shape)
    gathered = Value.plain(
        lowering.emit(
            "GATHER_ND",
            [dense, positions],
            (*shape, *(x.shape[a] for a in others)),
            "GatherNdOptions",
        )
    )
    ahead = [len(shape) + n for n in range(axes_before(axes))]
    behind = [n for n in range(len(shape) + len(others)) if n not in ahead]
    return gathered.permuted([*ahead, *behind])


def axes_before(axes: Sequence[int]) -> int:
    """How many axes of the result come before those of the index tensors for `axes`.

    If other axes are between `axes`, the index tensors give the first axes of the result.
    """
    return axes[0] if list(axes) == list(range(axes[0], axes[-1] + 1)) else 0


def coordinates(lowering: Lowering, indices: Sequence[Value], shape: tuple[Size, ...]) -> Tensor:
    """The broadcast `indices` as coordinates (*shape, number of indices) for GATHER_ND."""
    parts = []
    for value in indices:
        small = Value(value.tensor, value.stored_shape, value.order)
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
    """Put `values` at the positions `indices` of `x`, or add them to `x`.

    SCATTER_ND adds up values at equal positions. So without `accumulate`, each position may occur
    only once. A second SCATTER_ND finds the positions at which `x` stays unchanged.
    """
    axes = [axis for axis, given in enumerate(indices) if given is not None]
    given = [value for value in indices if value is not None]
    written = scattered(lowering, x, axes, given, values)
    if accumulate:
        return ADD(lowering, x, written)
    one = lowering.scalar(1, values.tensor.dtype)
    hits = scattered(lowering, x, axes, given, one)
    return where(
        lowering, apply(lowering, "EQUAL", [hits, one], "EqualOptions", "bool"), written, x
    )


def scattered(
    lowering: Lowering, x: Value, axes: Sequence[int], given: Sequence[Value], values: Value
) -> Value:
    """Zeros of the shape of `x`, with `values` added at the positions `given` of `axes`.

    SCATTER_ND needs int32 positions.
    """
    others = [axis for axis in range(len(x.shape)) if axis not in axes]
    order = [*axes, *others]
    shape = broadcast([v.shape for v in given], max(len(v.shape) for v in given))
    positions = lowering.emit(
        "CAST",
        [coordinates(lowering, given, shape)],
        (*shape, len(given)),
        "CastOptions",
        "int32",
    )
    rest = tuple(x.shape[axis] for axis in others)
    target = (*(x.shape[axis] for axis in axes), *rest)
    # `values` has the axis order of the result of `index`: axes before the indexed ones come first.
    first = axes_before(axes)
    full_shape = (*rest[:first], *shape, *rest[first:])
    lead = len(full_shape) - len(values.shape)
    small = Value(values.tensor, values.stored_shape, values.order)
    whole = lowering.reshaped(small, (*[1] * lead, *small.shape)).expanded(full_shape)
    inner = list(range(first, first + len(shape)))
    whole = whole.permuted([*inner, *(n for n in range(len(full_shape)) if n not in inner)])
    sums = lowering.emit(
        "SCATTER_ND",
        [positions, lowering.dense(whole), lowering.sizes(target)],
        target,
        "ScatterNdOptions",
        values.tensor.dtype,
    )
    return Value.plain(sums).permuted([order.index(n) for n in range(len(order))])


def index_select(lowering: Lowering, x: Value, axis: int, indices: Value) -> Value:
    """The elements `indices` of one axis."""
    axis %= len(x.shape)
    return index(lowering, x, [*[None] * axis, indices])


FORMS: LoweringRules = {
    aten.embedding.default: embedding,
    aten.index.Tensor: index,
    aten.index_select.default: index_select,
    aten.index_put.default: index_put,
}
