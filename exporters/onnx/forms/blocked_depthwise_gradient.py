"""Gradients of depthwise convolutions' weights by blocked convolutions: channels' dot products."""

import math
from functools import partial

from onnx_ir import Value

from exporters.onnx.forms.blocked_batches import by_batch
from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import DOMAIN, Dims, Gradient, dims_of, sizes_of

LEAST_BYTES = 2**19
"""Of smaller images the time saved, below 0.1 ms, is not worth the 65 kB that a choice takes."""


def depthwise_gradient(layout: BlockedValues, gradient: Gradient, result: Dims) -> Value | None:
    """The gradient of a depthwise convolution's weight, in the shape of `result`.

    `convolution.py` writes it as a convolution of the image by the gradient, with the batch
    among the channels. None if that has no blocked form.
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
    """The gradient (1, C, *size) of a full batch as the sum of its samples' gradients.

    One convolution computes them. Its channels are those of all samples, so it reads both images as
    they are.
    """
    samples, channels = layout.batch, gradient.groups
    groups, count = samples * channels, channels * math.prod(gradient.size)
    given = []
    for value, shape in ((gradient.image, (1, groups)), (gradient.moved, (groups, 1))):
        given.append(layout.reshaped(layout.image(value), *shape, *sizes_of(value)[2:]))
    sums = products(layout, gradient, given, gradient.pads, groups)
    each, axes = layout.reshaped(sums, samples, count), layout.constant([0])
    total = layout.add("ReduceSum", [each, axes], {"keepdims": 0}, shape=(count,))
    return layout.reshaped(total, 1, channels, *gradient.size)


def in_one_column(layout: BlockedValues, gradient: Gradient) -> Value:
    """The gradient (1, C, *size) of any batch, from two to four times as slow.

    The images lie below each other, with rows of zeros between them, and so do the gradients: one
    convolution whose kernel is as high as all of them.
    """
    channels, step = gradient.groups, gradient.dilations[0]
    high, rows = sizes_of(gradient.image)[2], sizes_of(gradient.moved)[2]
    top, left, bottom, right = gradient.pads
    # So far apart that no row of one image meets the gradient of the next one.
    apart = -(-max(high + max(top, bottom), step * rows) // step) * step
    given = [
        column(layout, gradient.image, apart, (1, channels)),
        column(layout, gradient.moved, apart // step, (channels, 1)),
    ]
    return products(layout, gradient, given, [top, left, rows_below(gradient), right], channels)


def rows_below(gradient: Gradient) -> int:
    """The rows of zeros that a column of images needs below it, besides those between them."""
    span = (gradient.size[0] - 1) * gradient.strides[0] + 1
    return span - gradient.pads[0] - gradient.dilations[0]


def column(layout: BlockedValues, value: Value, apart: int, channels: tuple[int, int]) -> Value:
    """The images of a batch below each other, one every `apart` rows: (*channels, H, W)."""
    image = layout.apart(value, layout.image(value))
    batch, (_, _, rows, columns, _) = dims_of(image)[0], sizes_of(image)
    padded = layout.padded(layout.permuted(image, 1, 0, 2, 3, 4), *[0] * 7, apart - rows, 0, 0)
    known = (*channels, batch and batch * apart, columns)
    return layout.reshaped(padded, *channels, -1, columns, dims=known)


def products(
    layout: BlockedValues, gradient: Gradient, given: list[Value], pads: list[int], groups: int
) -> Value:
    """The convolution of an image by a gradient that are `given` in so many groups."""
    window = {
        "pads": pads,
        "strides": gradient.strides,
        "dilations": gradient.dilations,
        "group": groups,
    }
    shape = (1, groups, *gradient.size)
    return layout.add("Conv", given, window, shape=shape, domain=DOMAIN)
