"""Lowering of operators along axes: sums, means, extremes, softmax, cumulative sums."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from exporters.tflite.elementwise import Single, cast
from exporters.tflite.flatbuffer import Size, Tensor
from exporters.tflite.lowering import Lowering, LoweringRules
from exporters.tflite.shape import MAX_AXES
from exporters.tflite.tensor_layouts import Value, product

aten = torch.ops.aten
MOST_AXES = 6
"""XNNPACK (LiteRT's fast library) reduces tensors of at most this many axes."""


def reduction(code: str) -> Single:
    """Make the function that lowers a sum, mean or extreme over some axes (default: all)."""

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
        # ATen sums booleans as integers, and a caller may ask for another type.
        x = lowering.materialized(cast(lowering, x) if code in ("SUM", "MEAN") else x)
        if not rank:
            return x
        stored = sorted(x.order[a] for a in gone)
        shape = [1 if p in stored else n for p, n in enumerate(x.tensor.shape)]
        order = x.order
        if not keep:
            left = [x.order[a] for a in range(rank) if a not in gone]
            order = tuple(sorted(left).index(p) for p in left)
            shape = [n for p, n in enumerate(x.tensor.shape) if p not in stored]
        many = rank > MOST_AXES
        tensor, over = with_few_axes(lowering, x.tensor, stored) if many else (x.tensor, stored)
        if code in ("SUM", "MEAN"):
            tensor = reduce_singly(lowering, code, tensor, over[1:])
        if over:
            sizes = [n for p, n in enumerate(tensor.shape) if p not in over] if many else shape
            read, keeps = [tensor, lowering.integers(over)], keep and not many
            tensor = lowering.emit(code, read, sizes, "ReducerOptions", keepDims=keeps)
        return Value(lowering.reshape(tensor, shape), tuple(shape[p] for p in order), order)

    return form


def with_few_axes(
    lowering: Lowering, tensor: Tensor, reduced: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Merge neighbouring axes of `tensor` that are all reduced or all kept. Drop axes of size one.

    Returns:
        The tensor, and the axes of it that must be reduced.
    """
    runs: list[tuple[bool, list[Size]]] = []
    for axis, size in enumerate(tensor.shape):
        is_reduced = axis in reduced
        if size != 1 and runs and runs[-1][0] == is_reduced:
            runs[-1][1].append(size)
        elif size != 1:
            runs.append((is_reduced, [size]))
    merged = lowering.reshape(tensor, [product(sizes) for _, sizes in runs])
    return merged, [n for n, (is_reduced, _) in enumerate(runs) if is_reduced]


def reduce_singly(lowering: Lowering, code: str, tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """Reduce one axis after the other, starting with the last. Reduced axes stay with size 1.

    XNNPACK (LiteRT's fast library) adds all numbers of a sum to one total and rounds the total
    after each addition. For a sum over all positions of a batch, the rounding error is too large:
    in a ResNet-20, it changes 10 of the six million masks of ReLUs.
    """
    for axis in reversed(axes):
        sizes = [1 if n == axis else size for n, size in enumerate(tensor.shape)]
        over = lowering.integers([axis])
        tensor = lowering.emit(code, [tensor, over], sizes, "ReducerOptions", keepDims=True)
    return tensor


def over_last(code: str, options: str, **settings: Any) -> Single:
    """Make the function that lowers an operator which TFLite has only for the last axis."""

    def form(lowering: Lowering, x: Value, axis: int, half: bool = False) -> Value:
        rank = len(x.shape)
        axes = [a for a in range(rank) if a != axis % rank] + [axis % rank]
        tensor = lowering.dense(x.permuted(axes))
        sizes = tensor.shape
        if rank > MAX_AXES:  # XNNPACK's limit
            tensor = lowering.reshape(tensor, [product(sizes[:-1]), sizes[-1]])
        results = lowering.emit(code, [tensor], tensor.shape, options, **settings)
        done = Value.plain(lowering.reshape(results, sizes) if rank > MAX_AXES else results)
        return done.permuted([axes.index(a) for a in range(rank)])

    return form


def cumsum(lowering: Lowering, x: Value, axis: int, **options: object) -> Value:
    """Cumulative sums along one axis."""
    # ATen adds booleans as integers, and a caller may ask for another type.
    tensor = lowering.dense(cast(lowering, x))
    along = lowering.graph.constant(np.asarray(axis % len(x.shape), np.int32))
    return Value.plain(lowering.emit("CUMSUM", [tensor, along], tensor.shape, "CumsumOptions"))


SUM = reduction("SUM")

FORMS: LoweringRules = {
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
    aten.cumsum.default: cumsum,
}
