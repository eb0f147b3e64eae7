"""Converts sums and means over pixels of images in ONNX Runtime's blocked layout."""

import numpy as np
from onnx_ir import Node, Value

from exporters.onnx.forms.blocked_batches import by_batch
from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import DOMAIN, POINTWISE, dims_of, sizes_of, whole_numbers

LEAST_BYTES = 2**21
"""For smaller products, a convolution gains less than the choice by the batch costs."""


def reduction(layout: BlockedValues, node: Node) -> bool:
    """Convert a sum or mean over pixels, or over pixels and samples."""
    value, axes = (*node.inputs, None)[:2]
    if value not in layout.images or value is None:
        return False
    over = sorted(axis % 4 for axis in whole_numbers(axes))
    keep = node.attributes["keepdims"].as_int()
    batch, channels, rows, columns = sizes_of(value)
    if over not in ([0, 2, 3], [2, 3]) or (keep and over == [0, 2, 3]):
        return False
    known, pixels = batch or None, rows * columns
    # The runtime's mean of blocked pixels takes less time than its sum over an axis with gaps.
    total = sum_of_products(layout, value)
    reduced = pooled(layout, layout.images[value]) if total is None else total
    if over == [0, 2, 3]:
        inputs, shape = [reduced, layout.constant(over)], (channels,)
        reduced = layout.add(node.op_type, inputs, {"keepdims": 0}, shape=shape)
    elif not keep:
        reduced = layout.reshaped(reduced, -1, channels, dims=(known, channels))
    summed, sums = total is not None, node.op_type == "ReduceSum"
    if summed != sums:
        number = layout.constant(np.array(pixels if sums else 1 / pixels, np.float32))
        reduced = layout.add("Mul", [reduced, number], shape=reduced.shape)
    reduced.shape = node.outputs[0].shape
    return layout.replaced(node.outputs[0], reduced)


def pooled(layout: BlockedValues, image: Value) -> Value:
    """The mean over pixels of `image` (N, C, H, W): (N, C, 1, 1)."""
    shape = (*dims_of(image)[:2], 1, 1)
    return layout.add("GlobalAveragePool", [image], shape=shape, domain=DOMAIN)


def sum_of_products(layout: BlockedValues, value: Value) -> Value | None:
    """Return the sum over pixels (N, C, 1, 1) of `value`, if it is a large product of two images.

    One image becomes the kernel of a depthwise convolution of the other image. The convolution
    reads each image once and does not write the product. For a full batch, the convolution has one
    group for each channel of each sample. Returns None if the product is small, or if other nodes
    read it, so that it must be computed anyway.
    """
    product = layout.images[value].producer()
    if product is None or product.op_type != "Mul" or len(value.uses()) != 1:
        return None
    first, second = product.inputs
    assert first is not None
    assert second is not None
    if not dims_of(first) == dims_of(second) == dims_of(value):
        return None
    _, channels, rows, columns = sizes_of(value)
    pixels, groups = rows * columns, layout.batch * channels
    if pixels == 1 or 4 * groups * pixels < LEAST_BYTES:
        return None

    def full() -> Value:
        image = layout.reshaped(first, 1, groups, rows, columns)
        kernel = layout.reshaped(second, groups, 1, rows, columns)
        window = {**POINTWISE, "kernel_shape": [rows, columns], "group": groups}
        sums = (1, groups, 1, 1)
        total = layout.add("Conv", [image, kernel], window, shape=sums, domain=DOMAIN)
        return layout.reshaped(total, layout.batch, channels, 1, 1)

    def any_batch() -> Value:
        mean = pooled(layout, layout.add("Mul", [first, second], shape=value.shape))
        number = layout.constant(np.array(pixels, np.float32))
        return layout.add("Mul", [mean, number], shape=mean.shape)

    return by_batch(layout, first, (dims_of(value)[0], channels, 1, 1), full, any_batch)
