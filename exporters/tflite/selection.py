"""Lowering of operators that select elements by the data: sort, top k, argmax, gather, scatter."""

from collections.abc import Sequence

import numpy as np
import torch
from ai_edge_litert import schema_py_generated as schema

from exporters.tflite import elementwise, shape
from exporters.tflite.elementwise import Single
from exporters.tflite.flatbuffer import Size, Tensor, open_size
from exporters.tflite.lowering import Lowering, LoweringRules, integer_range
from exporters.tflite.tensor_layouts import UnsupportedError, Value, product

aten = torch.ops.aten


def axis_to_last(value: Value, axis: int) -> Value:
    """Move `axis` to the end."""
    axis %= len(value.shape)
    return value.permuted([*(a for a in range(len(value.shape)) if a != axis), axis])


def last_to_axis(value: Value, axis: int) -> Value:
    """Move the last axis to `axis`: the inverse of `axis_to_last`."""
    rank = len(value.shape)
    axis %= rank
    return value.permuted([*range(axis), rank - 1, *range(axis, rank - 1)])


def top(
    lowering: Lowering,
    x: Value,
    count: Size,
    axis: int = -1,
    largest: bool = True,
    ordered: bool = True,
) -> tuple[Value, Value]:
    """The `count` largest or smallest elements along `axis`, sorted, and their indices.

    TOPK_V2 returns the largest elements of the last axis. For the smallest, `x` is negated.
    """
    x = axis_to_last(x, axis)
    tensor = lowering.dense(x)
    if not largest:
        tensor = lowering.emit("NEG", [tensor], tensor.shape)
    sizes: list[Size] = [*tensor.shape[:-1], count]
    if open_size(count):  # all samples of a batch
        number = lowering.reshape(lowering.open_size(count), ())
    else:
        number = lowering.graph.constant(np.asarray(count, np.int32))
    extremes, positions = lowering.graph.several(
        "TOPK_V2",
        [tensor, number],
        [(tensor.dtype, sizes), ("int32", sizes)],
        "TopKV2Options",
    )
    if not largest:
        extremes = lowering.emit("NEG", [extremes], sizes)
    positions = lowering.emit("CAST", [positions], sizes, "CastOptions", "int64")
    return last_to_axis(Value.plain(extremes), axis), last_to_axis(Value.plain(positions), axis)


def sort(
    lowering: Lowering,
    x: Value,
    dim: int = -1,
    descending: bool = False,
    stable: bool | None = None,
) -> tuple[Value, Value]:
    """All elements along an axis, sorted, and their indices. Equal elements keep their order."""
    return top(lowering, x, x.shape[dim], dim, descending)


def arg_extreme(code: str) -> Single:
    """Make the function that lowers argmax or argmin.

    The result is the index of the first maximum or minimum along an axis (default: all axes).
    """

    def form(lowering: Lowering, x: Value, axis: int | None = None, keep: bool = False) -> Value:
        result = lowering.shape
        if axis is None:
            x, axis = lowering.reshaped(x, (product(x.shape),)), 0
        tensor = lowering.dense(axis_to_last(x, axis))
        if tensor.dtype == "int64":  # LiteRT has no form for int64
            tensor = lowering.emit("CAST", [tensor], tensor.shape, "CastOptions", "int32")
        last = lowering.graph.constant(np.asarray(len(tensor.shape) - 1, np.int32))
        kind = schema.TensorType.INT64
        options = f"{code.title().replace('_', '')}Options"
        chosen = lowering.emit(
            code, [tensor, last], tensor.shape[:-1], options, "int64", outputType=kind
        )
        return lowering.reshaped(Value.plain(chosen), result)

    return form


def cropped(lowering: Lowering, x: Value, sizes: Sequence[Size], skipped: int) -> Value:
    """Crop `x` to `sizes` along all axes except the axis `skipped`. -1 means no such axis."""
    for axis, size in enumerate(sizes):
        if axis != skipped and x.shape[axis] != size:
            x = shape.cut(lowering, x, axis, 0, int(size))
    return x


def gather(lowering: Lowering, x: Value, axis: int, index: Value, **options: object) -> Value:
    """ATen's gather: element `index[..]` along `axis`, for each position of `index`."""
    axis %= len(x.shape)
    x = axis_to_last(cropped(lowering, x, index.shape, axis), axis)
    index = axis_to_last(index, axis)
    lead = product(index.shape[:-1])
    rows = lowering.reshaped(x, (lead, x.shape[-1]))
    positions = lowering.reshaped(index, (lead, index.shape[-1]))
    gathered = lowering.emit(
        "GATHER",
        [lowering.dense(rows), lowering.dense(positions)],
        positions.shape,
        "GatherOptions",
        axis=1,
        batchDims=1,
    )
    return last_to_axis(lowering.reshaped(Value.plain(gathered), index.shape), axis)


def scatter_add(lowering: Lowering, x: Value, axis: int, index: Value, source: Value) -> Value:
    """`x` with `source` added at the positions `index` along `axis`."""
    return elementwise.ADD(lowering, x, scattered(lowering, x, axis, index, source))


def scatter(lowering: Lowering, x: Value, axis: int, index: Value, source: Value) -> Value:
    """Put `source` at the positions `index` along `axis` of `x`. Each index may occur only once.

    TFLite's SCATTER_ND adds to zeros. A second SCATTER_ND finds the positions at which `x` stays
    unchanged.
    """
    written = scattered(lowering, x, axis, index, source)
    if not any(lowering.graph.data[x.tensor.index] or b"\1"):  # None: not a constant
        return written
    one = lowering.scalar(1, source.tensor.dtype)
    ones = lowering.reshaped(one, [1] * len(source.shape)).expanded(source.shape)
    hits = scattered(lowering, x, axis, index, ones)
    hit = elementwise.apply(lowering, "EQUAL", [hits, one], "EqualOptions", "bool")
    return elementwise.where(lowering, hit, written, x)


def scattered(lowering: Lowering, x: Value, axis: int, index: Value, source: Value) -> Value:
    """Zeros of the shape of `x`, with `source` added at the positions `index` along `axis`."""
    axis %= len(x.shape)
    if cropped(lowering, x, index.shape, axis).shape != x.shape:
        raise UnsupportedError("indices that do not cover the other axes")
    source = axis_to_last(cropped(lowering, source, index.shape, -1), axis)
    x, index = axis_to_last(x, axis), axis_to_last(index, axis)
    lead, count = product(index.shape[:-1]), index.shape[-1]
    # SCATTER_ND takes complete coordinates as int32: pair each index with the number of its row.
    rows = lowering.reshape(integer_range(lowering, lead), (lead, 1, 1))
    columns = lowering.dense(lowering.reshaped(index, (lead, count, 1)))
    columns = lowering.emit("CAST", [columns], columns.shape, "CastOptions", "int32")
    both: list[Tensor] = [lowering.broadcast(rows, columns.shape), columns]
    positions = lowering.emit(
        "CONCATENATION", both, (lead, count, 2), "ConcatenationOptions", axis=2
    )
    values = lowering.dense(lowering.reshaped(source, (lead, count)))
    whole = (lead, x.shape[-1])
    sums = lowering.emit(
        "SCATTER_ND",
        [positions, values, lowering.sizes(whole)],
        whole,
        "ScatterNdOptions",
        values.dtype,
    )
    return last_to_axis(lowering.reshaped(Value.plain(sums), x.shape), axis)


FORMS: LoweringRules = {
    aten.topk.default: top,
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten.argmax.default: arg_extreme("ARG_MAX"),
    aten.argmin.default: arg_extreme("ARG_MIN"),
    aten.gather.default: gather,
    aten.scatter_add.default: scatter_add,
    aten.scatter.src: scatter,
}
