"""Gradients of the weights of depthwise convolutions, computed by blocked convolutions."""

import math
from functools import partial

from onnx_ir import Value

from exporters.onnx.forms.blocked_batches import by_batch
from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import DOMAIN, Dims, Gradient, dims_of, sizes_of

LEAST_BYTES = 2**19
"""For smaller images, a choice by the batch saves less than 0.1 ms but takes 65 kB."""


def depthwise_gradient(layout: BlockedValues, gradient: Gradient, result: Dims) -> Value | None:
    """Return the gradient of a depthwise convolution's weight, in the shape of `result`.

    `exporters/decompositions/convolution.py` writes this gradient as a convolution, whose kernel is
    the gradient of the layer's output. The convolution has one input channel for each channel of
    each sample. Returns None if the convolution has no blocked form.
    """
    image, grad, channels = gradient.image, gradient.moved, gradient.groups
    for value in (image, grad):
        if not layout.fits(value) or dims_of(value)[1] != channels:
            return None
    if min(gradient.pads) < 0 or rows_below(gradient) < 0:
        return None
    blocks, _ = layout.image(image), layout.image(grad)
    any_batch = partial(in_one_column, layout, gradient)
    if 4 * layout.batch * math.prod(sizes_of(image)[1:]) < LEAST_BYTES:
        sums = any_batch()
    else:
        shape, full = (1, channels, *gradient.size), partial(by_samples, layout, gradient)
        sums = by_batch(layout, blocks, shape, full, any_batch)
    return layout.out_of_blocks(sums, result, channels)


def by_samples(layout: BlockedValues, gradient: Gradient) -> Value:
    """Return the gradient (1, C, *size) of a full batch: the sum of the gradients of its samples.

    One convolution computes the gradients of all samples. It treats each channel of each sample as
    a channel of one image, so nothing is copied.
    """
    samples, channels = layout.batch, gradient.groups
    groups, count = samples * channels, channels * math.prod(gradient.size)
    operands = []
    for value, shape in ((gradient.image, (1, groups)), (gradient.moved, (groups, 1))):
        operands.append(layout.reshaped(layout.image(value), *shape, *sizes_of(value)[2:]))
    sums = products(layout, gradient, operands, gradient.pads, groups)
    each, axes = layout.reshaped(sums, samples, count), layout.constant([0])
    total = layout.add("ReduceSum", [each, axes], {"keepdims": 0}, shape=(count,))
    return layout.reshaped(total, 1, channels, *gradient.size)


def in_one_column(layout: BlockedValues, gradient: Gradient) -> Value:
    """Return the gradient (1, C, *size) of a batch of any size.

    All images are stacked in one column, with rows of zeros between them. The gradients of the
    layer's output are stacked in another column. One convolution, whose kernel is the second
    column, computes the sum over all samples. It takes two to four times as long as `by_samples`.
    """
    channels, step = gradient.groups, gradient.dilations[0]
    high, rows = sizes_of(gradient.image)[2], sizes_of(gradient.moved)[2]
    top, left, bottom, right = gradient.pads
    # The distance of images, so large that no image meets the gradient of another one.
    apart = -(-max(high + max(top, bottom), step * rows) // step) * step
    operands = [
        column(layout, gradient.image, apart, (1, channels)),
        column(layout, gradient.moved, apart // step, (channels, 1)),
    ]
    return products(layout, gradient, operands, [top, left, rows_below(gradient), right], channels)


def rows_below(gradient: Gradient) -> int:
    """The number of rows of zeros that a column of images needs below the last image."""
    span = (gradient.size[0] - 1) * gradient.strides[0] + 1
    return span - gradient.pads[0] - gradient.dilations[0]


def column(layout: BlockedValues, value: Value, apart: int, channels: tuple[int, int]) -> Value:
    """Stack the images of a batch to one image (*channels, H, W).

    Each image starts `apart` rows below the start of the previous image.
    """
    image = layout.apart(value, layout.image(value))
    batch, (_, _, rows, columns, _) = dims_of(image)[0], sizes_of(image)
    padded = layout.padded(layout.permuted(image, 1, 0, 2, 3, 4), *[0] * 7, apart - rows, 0, 0)
    known = (*channels, batch and batch * apart, columns)
    return layout.reshaped(padded, *channels, -1, columns, dims=known)


def products(
    layout: BlockedValues, gradient: Gradient, operands: list[Value], pads: list[int], groups: int
) -> Value:
    """The convolution of `operands`, an image and a gradient, with `groups` groups."""
    window = {
        "pads": pads,
        "strides": gradient.strides,
        "dilations": gradient.dilations,
        "group": groups,
    }
    shape = (1, groups, *gradient.size)
    return layout.add("Conv", operands, window, shape=shape, domain=DOMAIN)
