"""Gradients of the inputs of strided convolutions, computed by blocked convolutions.

ONNX Runtime's own operator for these gradients, ConvTranspose, has no blocked form and uses one
thread.
"""

import math
from typing import NamedTuple

import numpy as np
from onnx_ir import Node, Value

from exporters.onnx.forms.blocked_pixels import with_zeros_between
from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import DOMAIN, dims_of, numbers, sizes_of

MOST_WORK = 2
"""A blocked convolution may take at most this many times the multiplications of ConvTranspose."""
NONE = -1
"""The index of a zero, which is added behind the elements of the kernel."""


class Axis(NamedTuple):
    """How one axis of the gradient is computed, for a convolution with the stride s.

    Pixel i = s * i' + r of the result (r < s) is a sum over the pixels i' - pad + m of the image,
    for all m < `window`. Each of these pixels is multiplied by an element of the kernel.

    Attributes:
        pixels: The number of values of i'.
        kernels: A list for each r. It has an entry for each m: the index of the kernel's element,
            or `NONE` for a zero.
        pads: Padding in front of the image and behind it.
        zeros: The factor by which the axis becomes longer, because zeros are put behind each pixel.
            1 means no zeros.
    """

    pixels: int
    kernels: list[list[int]]
    pads: tuple[int, int]
    zeros: int

    @property
    def window(self) -> int:
        """The number of pixels that are summed."""
        return len(self.kernels[0])


def strided_gradient(layout: BlockedValues, node: Node) -> bool:
    """Let a blocked convolution compute `node`, a strided ConvTranspose; False if none fits."""
    value, weight, *bias = node.inputs
    result, window = node.outputs[0], numbers(node)
    if value is None or weight is None or bias or not layout.fits(result):
        return False
    if value in layout.images and window["group"] == [dims_of(result)[1]]:
        return depthwise_gradient(layout, node)
    plain = window["group"] == [1] and set(window["dilations"]) == {1}
    fits = plain and weight not in layout.held and layout.fits(value)
    return fits and dense_gradient(layout, node)


def dense_gradient(layout: BlockedValues, node: Node) -> bool:
    """Convert `node` to one blocked convolution. Returns False if this would not be faster.

    The convolution computes the pixels of each remainder (position modulo stride) as separate
    channels. After it, these channels are interleaved.
    """
    value, weight = node.inputs[:2]
    assert value is not None
    assert weight is not None
    result = node.outputs[0]
    batch = dims_of(result)[0]
    axes = axes_of(node)
    if axes is None or dims_of(value)[0] == 1:
        return False
    rows, columns = axes
    b, blocks, across = layout.block, sizes_of(result)[1] // layout.block, len(columns.kernels)
    phases = len(rows.kernels) * across
    image = layout.add(
        "Conv",
        [layout.image(value), phase_filters(layout, weight, rows, columns)],
        {
            "kernel_shape": [rows.window, columns.window],
            "strides": [1, 1],
            "pads": [rows.pads[0], columns.pads[0], rows.pads[1], columns.pads[1]],
            "dilations": [1, 1],
            "group": 1,
        },
        shape=(batch, phases * blocks * b, rows.pixels, columns.pixels),
        domain=DOMAIN,
    )
    high, wide = rows.pixels * len(rows.kernels), columns.pixels * across
    if phases > 1:
        apart = (len(rows.kernels), across, rows.pixels, columns.pixels, b)
        images = batch and batch * blocks
        image = layout.reshaped(image, -1, *apart, dims=(images, *apart))
        image = layout.permuted(image, 0, 3, 1, 4, 2, 5)
        inside = (blocks * b, high, wide)
        image = layout.reshaped(image, -1, *inside, dims=(batch, *inside))
    if max(rows.zeros, columns.zeros) > 1:
        image = with_zeros_between(layout, image, [rows.zeros, columns.zeros])
    return layout.computed(result, image)


def axes_of(node: Node) -> tuple[Axis, Axis] | None:
    """Return how rows and columns of the dense ConvTranspose `node` are computed.

    Returns None if a blocked convolution would not be faster.
    """
    window, kernel = numbers(node), sizes_of(node.inputs[1])[2:]
    image, result = sizes_of(node.inputs[0])[2:], sizes_of(node.outputs[0])[2:]
    if 0 in kernel:
        return None
    rows, columns = map(axis, image, result, kernel, window["strides"], window["pads"][:2])
    if rows is None or columns is None:
        return None
    work = math.prod(len(axis.kernels) * axis.window for axis in (rows, columns))
    return (rows, columns) if work <= MOST_WORK * math.prod(kernel) else None


def axis(image: int, result: int, kernel: int, stride: int, pad: int) -> Axis | None:
    """Make an `Axis` from lengths in pixels; `pad` is the padding before the first pixel.

    Returns None if blocked convolutions cannot compute this axis.
    """
    if result % stride:
        return None
    if kernel == 1 and pad == 0:
        return Axis(image, [[0]], (0, 0), stride) if image * stride == result else None
    # Pixel i of the result sums over i + pad = stride * j + k, for pixels j of the image.
    taps = [
        [((r + pad - k) // stride, k) for k in range(kernel) if (r + pad - k) % stride == 0]
        for r in range(stride)
    ]
    positions = [position for tap in taps for position, _ in tap]
    first, last = min(positions), max(positions)
    pads = (-first, result // stride - 1 + last - (image - 1))
    kernels = [[dict(tap).get(m, NONE) for m in range(first, last + 1)] for tap in taps]
    return Axis(result // stride, kernels, pads, 1) if min(pads) >= 0 else None


def phase_filters(layout: BlockedValues, weight: Value, rows: Axis, columns: Axis) -> Value:
    """Turn `weight` (O, C, *kernel) into filters: an output channel for each channel and remainder.

    The output channels are in the order (C / b, remainders, b).
    """
    outputs, channels, high, wide = sizes_of(weight)
    b, filters = layout.block, layout.filter(weight, swap=True)
    if rows.kernels == columns.kernels == [[0]]:
        return filters
    # Each element of `filters` is b * b numbers. The kernel's elements are in reverse order.
    inputs, blocks = outputs // b, channels // b
    count = blocks * inputs * high * wide
    elements = np.arange(count).reshape(blocks, inputs, high, wide)[:, :, ::-1, ::-1]
    with_none = np.pad(elements, [(0, 0), (0, 0), (0, 1), (0, 1)], constant_values=count)
    chosen = with_none[:, :, np.array(rows.kernels)][..., np.array(columns.kernels)]
    order = chosen.transpose(0, 2, 4, 1, 3, 5)  # C / b, rows, columns, O / b, windows
    elements_of = layout.padded(layout.reshaped(filters, count, b * b), 0, 0, 1, 0)
    gathered = layout.add(
        "Gather",
        [elements_of, layout.constant(order.ravel())],
        {"axis": 0},
        shape=(order.size, b * b),
    )
    phases = len(rows.kernels) * len(columns.kernels)
    return layout.reshaped(gathered, phases * channels, outputs, rows.window, columns.window)


def depthwise_gradient(layout: BlockedValues, node: Node) -> bool:
    """Convert the gradient of a strided depthwise layer's input; False without a blocked form.

    A convolution of an image with zeros between its pixels is faster than the runtime's operator.
    """
    value, weight = node.inputs[:2]
    assert value is not None
    assert weight is not None
    result, window = node.outputs[0], numbers(node)
    shape, kernel = sizes_of(result), sizes_of(weight)
    if kernel[:2] != [shape[1], 1]:
        return False
    steps = window["strides"]
    spans = [d * (k - 1) for d, k in zip(window["dilations"], kernel[2:], strict=True)]
    front = [span - pad for span, pad in zip(spans, window["pads"][:2], strict=True)]
    # With zeros between its pixels, the image needs this padding for a result of this size.
    sizes = zip(shape[2:], sizes_of(value)[2:], steps, front, spans, strict=True)
    back = [size - old * step - first + span for size, old, step, first, span in sizes]
    if min(front + back) < 0:
        return False
    image = with_zeros_between(layout, layout.images[value], steps)
    turned = layout.turned(layout.plain(weight))
    attributes = {
        "kernel_shape": kernel[2:],
        "strides": [1, 1],
        "pads": front + back,
        "dilations": window["dilations"],
        "group": window["group"],
    }
    inputs = [image, layout.filter(turned, swap=False)]
    return layout.computed(result, layout.convolved(result, inputs, attributes))
