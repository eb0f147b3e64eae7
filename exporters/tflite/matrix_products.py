"""Lowering of matrix products."""

from collections.abc import Sequence

import numpy as np
import sympy
import torch

from exporters.tflite import along_axes, elementwise
from exporters.tflite.flatbuffer import Size, Tensor, open_size
from exporters.tflite.lowering import Lowering, LoweringRules
from exporters.tflite.tensor_layouts import UnsupportedError, Value

aten = torch.ops.aten
MIN_POSITIONS = 64
"""If samples have at least this many positions, one product per sample is faster than one for all
samples together."""


def matmul(lowering: Lowering, a: Value, b: Value) -> Value:
    """Product of matrices or batches of matrices. Factors may stay transposed.

    If a product sums over the positions of all samples, such as for a weight gradient, it is faster
    as one product per sample and a sum over samples. This form requires that the positions of a
    sample are adjacent in memory. After a loop over time, they are not adjacent.
    """
    a, b = lowering.materialized(a), lowering.materialized(b)
    if len(b.shape) == 2 and lowering.is_constant(b):
        return dense_layer(lowering, a, b, zeros(lowering, int(b.shape[1])))
    columns = a.shape[-1]
    if len(a.shape) == 2 and open_size(columns) and not a.in_order:
        each, samples = sympy.sympify(columns).as_coeff_Mul()
        if each >= MIN_POSITIONS:
            a = lowering.reshaped(a, (a.shape[0], samples, int(each))).permuted([1, 0, 2])
            b = lowering.reshaped(b, (samples, int(each), b.shape[1]))
            return along_axes.SUM(lowering, Value.plain(batched(lowering, a, b)), [0])
    return Value.plain(batched(lowering, a, b))


def batched(lowering: Lowering, a: Value, b: Value, result: Sequence[Size] | None = None) -> Tensor:
    """A batched matrix product. A factor may have size one in the batch axes."""
    (left, left_turned), (right, right_turned) = factor(lowering, a), factor(lowering, b)
    return lowering.emit(
        "BATCH_MATMUL",
        [left, right],
        result or (*a.shape[:-1], b.shape[-1]),
        "BatchMatMulOptions",
        adjX=left_turned,
        adjY=right_turned,
    )


def factor(lowering: Lowering, x: Value) -> tuple[Tensor, bool]:
    """The tensor of a factor, and whether its last two axes are transposed."""
    rank = len(x.order)
    turned = (*range(rank - 2), rank - 1, rank - 2)
    if x.order == turned:  # BATCH_MATMUL transposes a factor itself
        return x.tensor, True
    return lowering.dense(x), False


def addmm(lowering: Lowering, bias: Value, a: Value, b: Value, **options: object) -> Value:
    """bias + a b."""
    if options:
        raise UnsupportedError("scaled terms of addmm")
    if lowering.is_constant(b) and lowering.is_constant(bias) and len(bias.shape) == 1:
        return dense_layer(lowering, lowering.materialized(a), b, lowering.dense(bias))
    return elementwise.ADD(lowering, matmul(lowering, a, b), bias)


def dense_layer(lowering: Lowering, a: Value, b: Value, bias: Tensor) -> Value:
    """a b + bias, with constant weights `b`."""
    weights = lowering.dense(b.permuted([1, 0]))
    tensor = lowering.emit(
        "FULLY_CONNECTED",
        [lowering.dense(a), weights, bias],
        (a.shape[0], b.shape[1]),
        "FullyConnectedOptions",
    )
    return Value.plain(tensor)


def zeros(lowering: Lowering, count: int) -> Tensor:
    """A bias of zeros, for an operator that must have a bias."""
    return lowering.graph.constant(np.zeros(count, np.float32))


FORMS: LoweringRules = {
    aten.mm.default: matmul,
    aten.bmm.default: matmul,
    aten.addmm.default: addmm,
}
