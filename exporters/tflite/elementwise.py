"""Lowering of elementwise operators: arithmetic, comparisons, activations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from exporters.tflite.flatbuffer import Size, Tensor, open_size
from exporters.tflite.lowering import Lowering, LoweringRules, Number, as_float
from exporters.tflite.tensor_layouts import IMAGE, Value

aten = torch.ops.aten
Single = Callable[..., Value]
"""A lowering rule of an operator with one output."""

ERF_LIMIT = 4.0
# Rational approximation of erf on [-4, 4]: x * P(x^2) / Q(x^2), as in Eigen; error below 3e-7.
# TFLite has no operator for erf.
ERF_ABOVE = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
    -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
ERF_BELOW = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
    -1.42647390514189e-02,
)  # fmt: skip


OF_BOOLEANS = {
    "MUL": ("LOGICAL_AND", "LogicalAndOptions"),
    "ADD": ("LOGICAL_OR", "LogicalOrOptions"),
}
"""The logical operators that replace products and sums of two booleans."""
OF_EQUAL_SHAPES = ("ATAN2",)
"""Operators that LiteRT does not broadcast: it would read beyond the end of a smaller operand."""


def apply(
    lowering: Lowering,
    code: str,
    values: Sequence[Value],
    options: str | None = None,
    dtype: str | None = None,
    **settings: object,
) -> Value:
    """Emit the operator `code` on `values`, broadcast against each other, in one common layout.

    The layout is the layout of the largest value. If several values are equally large, the layout
    of images is used. If the other values are vectors, their conversion takes no time.
    """
    lead = max(values, key=lambda value: (elements(value), value.order == IMAGE))
    rank = max(len(v.stored_shape) for v in values)
    shape = broadcast([v.stored_shape for v in values], rank)
    if len(lead.order) < rank:
        lead = lowering.reshaped(
            unexpanded(lead), (*[1] * (rank - len(lead.stored_shape)), *lead.stored_shape)
        )
    tensors = [aligned(lowering, v, lead.order) for v in values]
    arranged: list[Size] = [0] * rank
    for axis, stored in enumerate(lead.order):
        arranged[stored] = shape[axis]
    if code in OF_EQUAL_SHAPES:
        tensors = [
            lowering.broadcast(t if t.shape else lowering.reshape(t, [1] * rank), arranged)
            for t in tensors
        ]
    tensor = lowering.emit(code, tensors, arranged, options, dtype, **settings)
    return Value(tensor, broadcast([v.shape for v in values], rank), lead.order)


def elements(value: Value) -> tuple[int, int, int]:
    """Return a key that sorts values by size.

    The key has three numbers: the number of axes whose size depends on the batch, the number of
    elements along the other axes, and the number of all axes.
    """
    known = math.prod(n for n in value.stored_shape if isinstance(n, int))
    return sum(map(open_size, value.stored_shape)), known, len(value.stored_shape)


def unexpanded(value: Value) -> Value:
    """Return `value` in the shape of its stored tensor, without the elements that only repeat."""
    return Value(value.tensor, value.stored_shape, value.order)


def aligned(lowering: Lowering, value: Value, order: tuple[int, ...]) -> Tensor:
    """The tensor of `value` in the layout `order`. Missing leading axes are added."""
    if not value.order:
        return value.tensor
    if len(value.order) < len(order):
        shape = (*[1] * (len(order) - len(value.stored_shape)), *value.stored_shape)
        value = lowering.reshaped(unexpanded(value), shape)
    return lowering.arranged(value, order)


def broadcast(shapes: Sequence[Sequence[Size]], rank: int) -> tuple[Size, ...]:
    """The common shape to which `shapes` broadcast."""
    padded = [(*[1] * (rank - len(shape)), *shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def binary(code: str, options: str | None, dtype: str | None = None) -> Single:
    """Make the function that lowers an operator with two operands, which are values or numbers.

    If the operator has a factor `alpha`, the second operand is multiplied by `alpha`.
    """

    def form(lowering: Lowering, a: Any, b: Any, *, alpha: Number = 1) -> Value:
        kind = next(v.tensor.dtype for v in (a, b) if isinstance(v, Value))
        kinds = [v.tensor.dtype for v in (a, b) if isinstance(v, Value)]
        # TFLite neither promotes types nor computes with booleans.
        if len(set(kinds)) == 2 or ("bool" in kinds and not code.startswith("LOGICAL")):
            kind = next((k for k in ("float32", "int64") if k in kinds), lowering.dtype)
            a, b = (numeric(lowering, v, kind) for v in (a, b))
        # The result is float32 for a quotient of integers, and for an integer with a float.
        broken = any(isinstance(v, float | torch.SymFloat) for v in (a, b))
        if kind == "int64" and (code == "DIV" or broken):
            kind = "float32"
            a, b = (numeric(lowering, v, kind) for v in (a, b))
        a, b = typed(lowering, a, kind), typed(lowering, b, kind)
        if kind == "bool" and code in OF_BOOLEANS:
            logical, logical_options = OF_BOOLEANS[code]
            return apply(lowering, logical, [a, b], logical_options)
        if alpha != 1:
            b = apply(lowering, "MUL", [b, lowering.scalar(alpha, kind)], "MulOptions")
        return apply(lowering, code, [a, b], options, dtype)

    return form


def numeric(lowering: Lowering, operand: Any, dtype: str) -> Any:
    """Cast a value to `dtype`. True becomes 1. Return other operands unchanged."""
    if isinstance(operand, Value) and operand.tensor.dtype != dtype:
        return apply(lowering, "CAST", [operand], "CastOptions", dtype)
    return operand


def typed(lowering: Lowering, operand: Any, dtype: str) -> Value:
    """Return `operand` as a value. A number that depends on the batch is computed at run time."""
    if isinstance(operand, Value):
        return operand
    if not isinstance(operand, bool | int | float):
        number: Value = numeric(lowering, Value.plain(as_float(lowering, operand)), dtype)
        return number
    return lowering.scalar(operand, dtype)


def unary(code: str, options: str | None = None) -> Single:
    """Make the function that lowers an operator with one operand."""

    def form(lowering: Lowering, x: Value) -> Value:
        return apply(lowering, code, [x], options)

    return form


def sign(lowering: Lowering, x: Value) -> Value:
    """-1, 0 or 1. LiteRT computes the sign only for floats."""
    if x.tensor.dtype == "float32":
        return apply(lowering, "SIGN", [x])
    kind = x.tensor.dtype
    above = apply(lowering, "MAXIMUM", [x, lowering.scalar(-1, kind)], "MaximumMinimumOptions")
    return apply(lowering, "MINIMUM", [above, lowering.scalar(1, kind)], "MaximumMinimumOptions")


def power(lowering: Lowering, x: Value, exponent: Number) -> Value:
    """x^exponent. A square is a product, and a square root has its own operator."""
    if exponent == 2:
        return apply(lowering, "MUL", [x, x], "MulOptions")
    if exponent == 0.5:
        return apply(lowering, "SQRT", [x])
    return apply(lowering, "POW", [x, lowering.scalar(exponent, x.tensor.dtype)], "PowOptions")


def reciprocal(lowering: Lowering, x: Value) -> Value:
    """1 / x."""
    return apply(lowering, "DIV", [lowering.scalar(1, x.tensor.dtype), x], "DivOptions")


def where(lowering: Lowering, condition: Value, a: Value, b: Value) -> Value:
    """Elements of `a` at positions at which the condition is true, otherwise elements of `b`."""
    return apply(lowering, "SELECT_V2", [condition, a, b], "SelectV2Options", a.tensor.dtype)


def gelu(lowering: Lowering, x: Value, *, approximate: str = "none") -> Value:
    """GELU, exact or approximated by tanh."""
    return apply(lowering, "GELU", [x], "GeluOptions", approximate=approximate == "tanh")


def erf(lowering: Lowering, x: Value) -> Value:
    """erf(x) = x * P(x^2) / Q(x^2), with x clamped to [-4, 4]: outside, |erf| is 1 in float32."""

    def const(number: float) -> Value:
        return lowering.scalar(number, "float32")

    x = apply(lowering, "MINIMUM", [x, const(ERF_LIMIT)], "MaximumMinimumOptions")
    x = apply(lowering, "MAXIMUM", [x, const(-ERF_LIMIT)], "MaximumMinimumOptions")
    square = apply(lowering, "MUL", [x, x], "MulOptions")

    def polynomial(factors: Sequence[float]) -> Value:
        total = const(factors[0])
        for factor in factors[1:]:
            total = apply(lowering, "MUL", [total, square], "MulOptions")
            total = apply(lowering, "ADD", [total, const(factor)], "AddOptions")
        return total

    above = apply(lowering, "MUL", [x, polynomial(ERF_ABOVE)], "MulOptions")
    return apply(lowering, "DIV", [above, polynomial(ERF_BELOW)], "DivOptions")


def divide(lowering: Lowering, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    """a / b. If `rounding_mode` is "floor", it is rounded down. Decompositions replace "trunc".

    TFLite divides integers as int32.
    """
    if rounding_mode is None:
        return DIV(lowering, a, b)
    if lowering.dtype == "float32":
        return apply(lowering, "FLOOR", [DIV(lowering, a, b)])
    small = [typed(lowering, numeric(lowering, operand, "int32"), "int32") for operand in (a, b)]
    quotient = apply(lowering, "FLOOR_DIV", small, "FloorDivOptions")
    return apply(lowering, "CAST", [quotient], "CastOptions", "int64")


RANGES: dict[tuple[Number | None, Number | None], str] = {(-1, 1): "RELU_N1_TO_1", (0, 6): "RELU6"}


def clamp(
    lowering: Lowering, x: Value, low: Number | None = None, high: Number | None = None
) -> Value:
    """`x` clamped to [low, high]. None means no limit. TFLite has operators for some ranges."""
    if x.tensor.dtype == "float32" and (low, high) in RANGES:
        return apply(lowering, RANGES[low, high], [x])
    for code, bound in (("MAXIMUM", low), ("MINIMUM", high)):
        if bound is not None:
            limit = lowering.scalar(bound, x.tensor.dtype)
            x = apply(lowering, code, [x, limit], "MaximumMinimumOptions")
    return x


def relu(lowering: Lowering, x: Value) -> Value:
    """max(x, 0). If `x` is the result of another RELU, it is returned."""
    if x.tensor.index in lowering.rectified:
        return x
    result = apply(lowering, "RELU", [x])
    lowering.rectified.add(result.tensor.index)
    return result


def hardtanh(lowering: Lowering, x: Value, low: Number = -1, high: Number = 1) -> Value:
    """`x` clamped to [low, high]."""
    return clamp(lowering, x, low, high)


def greater(lowering: Lowering, a: Any, b: Any) -> Value:
    """a > b. Remembers the operands, because `cast` can avoid the comparison."""
    result = COMPARE(lowering, a, b)
    if isinstance(a, Value) and isinstance(b, Value) and a.tensor.dtype == "float32":
        lowering.greater[result] = a, b
    return result


def cast(lowering: Lowering, x: Value, **options: object) -> Value:
    """Cast `x` to the node's type. Other options, such as a device, have no meaning in a graph.

    XNNPACK (LiteRT's fast library) has no comparisons. So a comparison a > b that is cast to
    float32 is computed as ceil(min(relu(a - b), 1)).
    """
    if x.tensor.dtype == lowering.dtype:
        return x
    if x in lowering.greater and lowering.dtype == "float32":
        above = apply(lowering, "RELU", [SUB(lowering, *lowering.greater[x])])
        return apply(lowering, "CEIL", [hardtanh(lowering, above)])
    return apply(lowering, "CAST", [x], "CastOptions", lowering.dtype)


ADD = binary("ADD", "AddOptions")
COMPARE = binary("GREATER", "GreaterOptions", "bool")
SUB = binary("SUB", "SubOptions")
MUL = binary("MUL", "MulOptions")
DIV = binary("DIV", "DivOptions")

FORMS: LoweringRules = {
    aten.add.Tensor: ADD,
    aten.add.Scalar: ADD,
    aten.sub.Tensor: SUB,
    aten.sub.Scalar: SUB,
    aten.mul.Tensor: MUL,
    aten.mul.Scalar: MUL,
    aten.div.Tensor: DIV,
    aten.div.Scalar: DIV,
    aten.div.Tensor_mode: divide,
    aten.div.Scalar_mode: divide,
    aten.maximum.default: binary("MAXIMUM", "MaximumMinimumOptions"),
    aten.minimum.default: binary("MINIMUM", "MaximumMinimumOptions"),
    aten.atan2.default: binary("ATAN2", "ATan2Options"),
    aten.remainder.Tensor: binary("FLOOR_MOD", "FloorModOptions"),
    aten.remainder.Scalar: binary("FLOOR_MOD", "FloorModOptions"),
    aten.eq.Tensor: binary("EQUAL", "EqualOptions", "bool"),
    aten.eq.Scalar: binary("EQUAL", "EqualOptions", "bool"),
    aten.ne.Tensor: binary("NOT_EQUAL", "NotEqualOptions", "bool"),
    aten.ne.Scalar: binary("NOT_EQUAL", "NotEqualOptions", "bool"),
    aten.gt.Tensor: greater,
    aten.gt.Scalar: binary("GREATER", "GreaterOptions", "bool"),
    aten.ge.Tensor: binary("GREATER_EQUAL", "GreaterEqualOptions", "bool"),
    aten.ge.Scalar: binary("GREATER_EQUAL", "GreaterEqualOptions", "bool"),
    aten.lt.Tensor: binary("LESS", "LessOptions", "bool"),
    aten.lt.Scalar: binary("LESS", "LessOptions", "bool"),
    aten.le.Tensor: binary("LESS_EQUAL", "LessEqualOptions", "bool"),
    aten.le.Scalar: binary("LESS_EQUAL", "LessEqualOptions", "bool"),
    aten.logical_and.default: binary("LOGICAL_AND", "LogicalAndOptions"),
    aten.bitwise_and.Tensor: binary("LOGICAL_AND", "LogicalAndOptions"),
    aten.logical_or.default: binary("LOGICAL_OR", "LogicalOrOptions"),
    aten.bitwise_or.Tensor: binary("LOGICAL_OR", "LogicalOrOptions"),
    aten.logical_not.default: unary("LOGICAL_NOT"),
    aten.bitwise_not.default: unary("LOGICAL_NOT"),
    aten.floor.default: unary("FLOOR"),
    aten.ceil.default: unary("CEIL"),
    aten.round.default: unary("ROUND"),
    aten.exp2.default: lambda lowering, x: binary("POW", "PowOptions")(lowering, 2.0, x),
    aten.neg.default: unary("NEG"),
    aten.abs.default: unary("ABS"),
    aten.exp.default: unary("EXP"),
    aten.log.default: unary("LOG"),
    aten.sqrt.default: unary("SQRT"),
    aten.rsqrt.default: unary("RSQRT"),
    aten.sin.default: unary("SIN"),
    aten.cos.default: unary("COS"),
    aten.sign.default: sign,
    aten.relu.default: relu,
    aten.tanh.default: unary("TANH"),
    aten.sigmoid.default: unary("LOGISTIC"),
    aten.gelu.default: gelu,
    aten.erf.default: erf,
    aten.clamp.default: clamp,
    aten.hardtanh.default: hardtanh,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Tensor_Tensor: binary("POW", "PowOptions"),
    aten.pow.Scalar: binary("POW", "PowOptions"),
    aten.rsub.Scalar: lambda lowering, x, number, alpha=1: SUB(lowering, number, x),
    aten.reciprocal.default: reciprocal,
    aten.where.self: where,
    aten._to_copy.default: cast,
}
