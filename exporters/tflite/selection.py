"""Operators that choose elements by the data: order, largest ones, places that tensors name."""

from collections.abc import Sequence

import numpy as np
import torch
from ai_edge_litert import schema_py_generated as schema

from exporters.tflite import elementwise, shape
from exporters.tflite.elementwise import Single
from exporters.tflite.flatbuffer import Size, Tensor
from exporters.tflite.lowering import Lowering, LoweringRules, counted
from exporters.tflite.values import UnsupportedError, Value, product

aten = torch.ops.aten


def behind(value: Value, axis: int) -> Value:
    """`value` with `axis` as its last one."""
    axis %= len(value.shape)
    return value.permuted([*(a for a in range(len(value.shape)) if a != axis), axis])


def back(value: Value, axis: int) -> Value:
    """`value` with its last axis as `axis`."""
    rank = len(value.shape)
    axis %= rank
    return value.permuted([*range(axis), rank - 1, *range(axis, rank - 1)])


def top(
    lowering: Lowering,
    x: Value,
    count: int,
    axis: int = -1,
    largest: bool = True,
    ordered: bool = True,
) -> tuple[Value, Value]:
    """The `count` largest or smallest elements along `axis`, in order, and where they are."""
    x = behind(x, axis)
    tensor = lowering.dense(x)
    if not largest:
        tensor = lowering.emit("NEG", [tensor], tensor.shape)
    sizes: list[Size] = [*tensor.shape[:-1], count]
    found, places = lowering.graph.several(
        "TOPK_V2",
        [tensor, lowering.graph.constant(np.asarray(count, np.int32))],
        [(tensor.dtype, sizes), ("int32", sizes)],
        "TopKV2Options",
    )
    if not largest:
        found = lowering.emit("NEG", [found], sizes)
    places = lowering.emit("CAST", [places], sizes, "CastOptions", "int64")
    return back(Value.plain(found), axis), back(Value.plain(places), axis)


def sort(
    lowering: Lowering, x: Value, axis: int = -1, descending: bool = False
) -> tuple[Value, Value]:
    """All elements along `axis` in order, and where they were."""
    return top(lowering, x, int(x.shape[axis]), axis, descending)


def place_of(code: str) -> Single:
    """Where along an axis (default: of all elements) the first extreme is."""

    def form(lowering: Lowering, x: Value, axis: int | None = None, keep: bool = False) -> Value:
        result = lowering.shape
        if axis is None:
            x, axis = lowering.reshaped(x, (product(x.shape),)), 0
        tensor = lowering.dense(behind(x, axis))
        last = lowering.graph.constant(np.asarray(len(tensor.shape) - 1, np.int32))
        kind = schema.TensorType.INT64
        options = f"{code.title().replace('_', '')}Options"
        found = lowering.emit(
            code, [tensor, last], tensor.shape[:-1], options, "int64", outputType=kind
        )
        return lowering.reshaped(Value.plain(found), result)

    return form


def fitted(lowering: Lowering, x: Value, sizes: Sequence[Size], but: int) -> Value:
    """`x` cut to `sizes` along all axes but one."""
    for axis, size in enumerate(sizes):
        if axis != but and x.shape[axis] != size:
            x = shape.cut(lowering, x, axis, 0, int(size))
    return x


def gather(lowering: Lowering, x: Value, axis: int, index: Value, **options: object) -> Value:
    """The elements along `axis` that `index` names at each place."""
    axis %= len(x.shape)
    x = behind(fitted(lowering, x, index.shape, axis), axis)
    index = behind(index, axis)
    lead = product(index.shape[:-1])
    rows = lowering.reshaped(x, (lead, x.shape[-1]))
    places = lowering.reshaped(index, (lead, index.shape[-1]))
    found = lowering.emit(
        "GATHER",
        [lowering.dense(rows), lowering.dense(places)],
        places.shape,
        "GatherOptions",
        axis=1,
        batchDims=1,
    )
    return back(lowering.reshaped(Value.plain(found), index.shape), axis)


def scatter_add(lowering: Lowering, x: Value, axis: int, index: Value, source: Value) -> Value:
    """`x` with `source` added at the places along `axis` that `index` names."""
    return elementwise.ADD(lowering, x, scattered(lowering, x, axis, index, source))


def scatter(lowering: Lowering, x: Value, axis: int, index: Value, source: Value) -> Value:
    """`source` at the places along `axis` that `index` names, each once, and zeros elsewhere."""
    if any(lowering.graph.data[x.tensor.index] or b"\1"):
        raise UnsupportedError("scatter into what is not zeros")
    return scattered(lowering, x, axis, index, source)


def scattered(lowering: Lowering, x: Value, axis: int, index: Value, source: Value) -> Value:
    """Sums of `source` at the places that `index` names of a tensor as large as `x`."""
    axis %= len(x.shape)
    if fitted(lowering, x, index.shape, axis).shape != x.shape:
        raise UnsupportedError("indices for a part of the other axes")
    source = behind(fitted(lowering, source, index.shape, -1), axis)
    x, index = behind(x, axis), behind(index, axis)
    lead, count = product(index.shape[:-1]), index.shape[-1]
    rows = lowering.reshape(counted(lowering, lead), (lead, 1, 1))
    columns = lowering.dense(lowering.reshaped(index, (lead, count, 1)))
    columns = lowering.emit("CAST", [columns], columns.shape, "CastOptions", "int32")
    both: list[Tensor] = [lowering.broadcast(rows, columns.shape), columns]
    places = lowering.emit("CONCATENATION", both, (lead, count, 2), "ConcatenationOptions", axis=2)
    values = lowering.dense(lowering.reshaped(source, (lead, count)))
    whole = (lead, x.shape[-1])
    sums = lowering.emit(
        "SCATTER_ND",
        [places, values, lowering.sizes(whole)],
        whole,
        "ScatterNdOptions",
        values.dtype,
    )
    return back(lowering.reshaped(Value.plain(sums), x.shape), axis)


FORMS: LoweringRules = {
    aten.topk.default: top,
    aten.sort.default: sort,
    aten.argmax.default: place_of("ARG_MAX"),
    aten.argmin.default: place_of("ARG_MIN"),
    aten.gather.default: gather,
    aten.scatter_add.default: scatter_add,
    aten.scatter.src: scatter,
}
