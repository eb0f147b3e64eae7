"""Lowering of convolutions, max pooling and batch normalisation."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from ai_edge_litert import schema_py_generated as schema

from exporters.decompositions.average_pooling import several
from exporters.tflite import elementwise, shape
from exporters.tflite.flatbuffer import Size, Tensor
from exporters.tflite.lowering import Lowering, LoweringRules
from exporters.tflite.matrix_products import batched, zeros
from exporters.tflite.tensor_layouts import IMAGE, UnsupportedError, Value, product

aten = torch.ops.aten


def convolution(
    lowering: Lowering,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Value:
    """A convolution with one or two spatial dimensions.

    The convolution has one group, or one group for each input channel: `grouped_convolutions.py`
    rewrites other convolutions. Padding is a separate operator. But if the weights are constants
    and the padding equals TFLite's SAME, SAME is used.
    """
    if transposed or len(x.shape) not in (3, 4):
        raise UnsupportedError("a transposed or three-dimensional convolution")
    result = whole = lowering.shape
    if len(x.shape) == 3:  # TFLite has convolutions of images only: use a height of 1
        x = lowering.reshaped(x, (*x.shape[:2], 1, x.shape[2]))
        weight = lowering.reshaped(weight, (*weight.shape[:2], 1, weight.shape[2]))
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
        whole = (*result[:2], 1, result[2])
    x = Value(lowering.dense(x, IMAGE), x.shape, IMAGE)
    held = lowering.is_constant(weight)
    same = held and all(
        is_same(int(x.shape[2 + a]), int(weight.shape[2 + a]), stride[a], dilation[a], padding[a])
        for a in (0, 1)
    )
    sides = [0, 0] if same else padding
    widths = [[0, 0], [sides[0]] * 2, [sides[1]] * 2, [0, 0]]
    image = shape.padded(lowering, x, widths, 0).tensor
    scheme = schema.Padding.SAME if same else schema.Padding.VALID
    if held or groups > 1:
        convolved = own_convolution(
            lowering, image, weight, stride, dilation, whole, scheme, depthwise=groups > 1
        )
    else:
        # (kh, kw, I, O): the first axis is the row that `convolution_by_rows` takes.
        filters = lowering.dense(weight.permuted([2, 3, 1, 0]))
        size = (whole[0], whole[2], whole[3])
        convolved = convolution_by_rows(lowering, image, filters, stride, dilation, size)
    value = Value(convolved, whole, IMAGE)
    if bias is not None:
        bias = lowering.reshaped(bias, (1, bias.shape[0], 1, 1))
        value = elementwise.ADD(lowering, value, bias)
    return lowering.reshaped(value, result)


def is_same(size: int, kernel: int, stride: int, dilation: int, padding: int) -> bool:
    """Whether `padding` on both sides of an axis of `size` pixels equals TFLite's SAME padding.

    SAME gives ceil(size / stride) results. SAME pads only as much as these results need, with half
    of the padding in front.
    """
    span = (kernel - 1) * dilation + 1
    count = -(-size // stride)
    needed = max((count - 1) * stride + span - size, 0)
    return (size + 2 * padding - span) // stride + 1 == count and needed // 2 == padding


def own_convolution(
    lowering: Lowering,
    image: Tensor,
    weight: Value,
    stride: list[int],
    dilation: list[int],
    result: Sequence[Size],
    scheme: int,
    depthwise: bool,
) -> Tensor:
    """TFLite's own convolution of an image; `scheme` is its padding.

    It has one group, or with `depthwise` one group per input channel.
    """
    outputs = int(result[1])
    code, options, order, more = "CONV_2D", "Conv2DOptions", [0, 2, 3, 1], dict[str, Any]()
    if depthwise:  # filters are (1, kh, kw, outputs), sorted by input channel
        code, options, order = "DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions", [1, 2, 3, 0]
        more["depthMultiplier"] = outputs // int(image.shape[3])
    return lowering.emit(
        code,
        [image, lowering.dense(weight.permuted(order)), zeros(lowering, outputs)],
        (result[0], *result[2:], outputs),
        options,
        padding=scheme,
        strideH=stride[0],
        strideW=stride[1],
        dilationHFactor=dilation[0],
        dilationWFactor=dilation[1],
        **more,
    )


def convolution_by_rows(
    lowering: Lowering,
    image: Tensor,
    filters: Tensor,
    stride: list[int],
    dilation: list[int],
    result: tuple[Size, Size, Size],
) -> Tensor:
    """A convolution as one matrix product for each row of its kernel.

    `image` is (N, H, W, I), `filters` (kh, kw, I, O). The kw slices of the image that one kernel
    row reads are concatenated along the channels. If the weights are not constants, XNNPACK
    (LiteRT's fast library) rejects TFLite's own convolution, which is then several times slower.
    XNNPACK accepts the products of this function.
    """
    batch, high, wide = result
    rows, columns, _, outputs = filters.shape
    x, w = Value.plain(image), Value.plain(filters)

    def window(x: Value, axis: int, number: int, count: Size) -> Value:
        first, step = number * dilation[axis - 1], stride[axis - 1]
        if step == 1 and count == x.shape[axis]:
            return x
        return shape.cut(lowering, x, axis, first, first + step * (int(count) - 1) + 1, step)

    slices = [window(x, 2, number, wide) for number in range(int(columns))]
    strip = shape.concatenate(lowering, slices, 3)
    if rows == 1:
        rows_of = [window(strip, 1, 0, high)]
    elif stride[0] > 1:  # a single product would also compute the lines that the stride skips
        rows_of = [window(strip, 1, number, high) for number in range(int(rows))]
    else:
        return convolution_in_one_product(lowering, strip, w, dilation[0], result)
    total: Value | None = None
    for number, left in enumerate(rows_of):
        left = lowering.reshaped(left, (product(left.shape[:3]), left.shape[3]))
        right = shape.cut(lowering, w, 0, number, number + 1)
        right = lowering.reshaped(right, (product(right.shape[:3]), outputs))
        part = Value.plain(batched(lowering, left, right))
        total = part if total is None else elementwise.ADD(lowering, total, part)
    assert total is not None
    return lowering.reshape(total.tensor, (batch, high, wide, outputs))


def convolution_in_one_product(
    lowering: Lowering,
    strip: Value,
    filters: Value,
    dilation: int,
    result: tuple[Size, Size, Size],
) -> Tensor:
    """A convolution of vertical stride 1 as one product for all rows of its kernel.

    `strip` is (N, lines, W, kw I), `filters` (kh, kw, I, O). For every line, the product contains
    the results of all kh kernel rows. Line h of the convolution is a sum over the kernel rows r:
    each row r contributes its result at line h + r dilation.
    """
    batch, high, wide = result
    rows, columns, inputs, outputs = (int(n) for n in filters.shape)
    lines = strip.shape[1]
    left = lowering.reshaped(strip, (batch, product([lines, wide]), columns * inputs))
    right = lowering.reshaped(filters.permuted([1, 2, 0, 3]), (1, columns * inputs, rows * outputs))
    products = Value.plain(batched(lowering, left, right, (batch, left.shape[1], rows * outputs)))
    pixels = int(high) * int(wide)
    total: Value | None = None
    for row in range(rows):
        first = row * dilation * int(wide)
        ends = {1: (first, first + pixels), 2: (row * outputs, (row + 1) * outputs)}
        part = Value.plain(shape.part(lowering, products.tensor, ends))
        total = part if total is None else elementwise.ADD(lowering, total, part)
    assert total is not None
    return lowering.reshape(total.tensor, (batch, high, wide, outputs))


def max_pool(
    lowering: Lowering,
    x: Value,
    kernel: list[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value, None]:
    """The maximum of each window. No operator here reads the indices, so they are None."""
    if any(n != 1 for n in dilation):
        raise UnsupportedError("a dilated pooling window")
    kernel = several(kernel, 2)
    stride, padding = several(stride or kernel, 2), several(padding, 2)
    result = lowering.shape
    x = Value(lowering.dense(x, IMAGE), x.shape, IMAGE)
    widths = [[0, 0]]
    for axis in (0, 1):
        # In ceil mode, the last window may end behind the padding.
        span = (int(result[2 + axis]) - 1) * stride[axis] + kernel[axis]
        behind = span - int(x.shape[2 + axis]) - padding[axis]
        widths.append([padding[axis], max(behind, 0)])
    # Padding with -inf is never the maximum; zeros would be the maximum of negative numbers.
    image = shape.padded(lowering, x, [*widths, [0, 0]], -math.inf).tensor
    batch, channels, high, wide = result
    tensor = lowering.emit(
        "MAX_POOL_2D",
        [image],
        (batch, high, wide, channels),
        "Pool2DOptions",
        padding=schema.Padding.VALID,
        strideH=stride[0],
        strideW=stride[1],
        filterHeight=kernel[0],
        filterWidth=kernel[1],
    )
    return Value(tensor, result, IMAGE), None


def batch_norm(
    lowering: Lowering,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, None, None]:
    """x * scale + shift with scale = w / sqrt(var + eps) and shift = b - mean * scale."""
    # Combine the coefficients of each channel first, so that only two operators run on images.
    scale = elementwise.apply(lowering, "RSQRT", [elementwise.ADD(lowering, var, eps)])
    if weight is not None:
        scale = elementwise.MUL(lowering, scale, weight)
    shift = elementwise.MUL(lowering, mean, scale)
    zero = lowering.scalar(0.0, "float32") if bias is None else bias
    shift = elementwise.SUB(lowering, zero, shift)
    along = (1, *mean.shape, *[1] * (len(x.shape) - 2))
    scaled = elementwise.MUL(lowering, x, lowering.reshaped(scale, along))
    return elementwise.ADD(lowering, scaled, lowering.reshaped(shift, along)), None, None


FORMS: LoweringRules = {
    aten.convolution.default: convolution,
    aten.max_pool2d_with_indices.default: max_pool,
    aten._native_batch_norm_legit_no_training.default: batch_norm,
}
