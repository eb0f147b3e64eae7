"""Lowering of operators that create constants and ranges. A range may depend on the batch."""

from typing import Any

import numpy as np
import sympy
import torch

from exporters.tflite import elementwise
from exporters.tflite.lowering import (
    Lowering,
    LoweringRules,
    Number,
    as_float,
    integer_range,
)
from exporters.tflite.tensor_layouts import UnsupportedError, Value

aten = torch.ops.aten


def full(lowering: Lowering, size: object, number: Number, **options: object) -> Value:
    """A tensor filled with one number, which is stored once, or computed from the batch size."""
    rank, shape, dtype = len(lowering.shape), lowering.shape, lowering.dtype
    if isinstance(number, Value | sympy.Expr):
        one = lowering.reshape(as_float(lowering, number), (1,) * rank)
        lowering.shape, lowering.dtype = (1,) * rank, dtype
        return elementwise.cast(lowering, Value.plain(one)).expanded(shape)
    values = np.full([1] * rank, number, lowering.dtype)
    return Value.plain(lowering.graph.constant(values)).expanded(lowering.shape)


def full_like(lowering: Lowering, x: Value, number: Number, **options: object) -> Value:
    """A tensor of the shape of `x`, filled with one number."""
    return full(lowering, None, number)


def scalar_tensor(lowering: Lowering, number: Number, **options: object) -> Value:
    """A number as a tensor without axes."""
    return full(lowering, None, number)


def arange(
    lowering: Lowering, start: Number, end: Any, step: Number = 1, **options: object
) -> Value:
    """Numbers from `start` up to `end`, `step` apart. `end` may be a multiple of the batch size."""
    if all(isinstance(n, int | float) for n in (start, end, step)):
        numbers = np.arange(start, end, step).astype(lowering.dtype)
        return Value.plain(lowering.graph.constant(numbers))
    if start != 0 or step != 1:
        raise UnsupportedError("a range over the batch that does not count from 0 in steps of 1")
    return elementwise.cast(lowering, Value.plain(integer_range(lowering, end)))


FORMS: LoweringRules = {
    aten.full.default: full,
    aten.full_like.default: full_like,
    aten.scalar_tensor.default: scalar_tensor,
    aten.arange.start_step: arange,
}
