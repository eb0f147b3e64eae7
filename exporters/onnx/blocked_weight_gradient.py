"""Gradients of depthwise convolutions' weights by blocked convolutions."""

from typing import TYPE_CHECKING

from onnx_ir import Node, Value

from exporters.onnx.graph_reading import DOMAIN, dims_of, numbers, rows_of, swapped

if TYPE_CHECKING:
    from exporters.onnx.blocked_layout import BlockedLayout


def depthwise_weight_gradient(layout: "BlockedLayout", node: Node) -> bool:
    """The gradient of a depthwise convolution's weight: each channel's dot products.

    `convolution.py` writes it as a convolution of the image by the gradient, with the batch
    among the channels. Here the images of a batch lie below each other, with rows of zeros
    between them, and so do the gradients: one depthwise convolution whose kernel is as high as
    all of them. It computes K results for each channel, of whole blocks at a time.
    """
    image, pads = rows_of(node)
    grad = swapped(node.inputs[1])
    window, result = numbers(node), node.outputs[0]
    channels = window["group"][0]
    if image is None or grad is None or not (layout.fits(image) and layout.fits(grad)):
        return False
    _, _, height, width = (size or 0 for size in dims_of(image))
    _, count, rows, columns = (size or 0 for size in dims_of(grad))
    step, kernel = window["dilations"][0], int(dims_of(result)[2] or 0)
    top, left, bottom, right = pads
    # So far apart that no row of one image meets the gradient of the next one.
    apart = -(-max(height + max(top, bottom), step * rows) // step) * step
    below = kernel - top - step
    if dims_of(image)[1] != channels or count != channels or below < 0 or top < 0:
        return False
    strips = [
        strip(layout, image, height, apart, (1, channels, -1, width)),
        strip(layout, grad, rows, apart // step, (channels, 1, -1, columns)),
    ]
    found = layout.add(
        "Conv",
        strips,
        {
            "pads": [top, left, below, right],
            "strides": [1, 1],
            "dilations": window["dilations"],
            "group": channels,
        },
        shape=result.shape,
        domain=DOMAIN,
    )
    plain = {"channels": channels}
    back = layout.add("ReorderOutput", [found], plain, shape=result.shape, domain=DOMAIN)
    return layout.replaced(result, back)


def strip(
    layout: "BlockedLayout", value: Value, rows: int, apart: int, shape: tuple[int, ...]
) -> Value:
    """The images of a batch below each other, one every `apart` rows, in this shape."""
    found = layout.permuted(layout.apart(value, layout.image(value)), 1, 0, 2, 3, 4)
    blocks, batch, _, columns, block = dims_of(found)
    if apart > rows:
        more = [0] * 7 + [apart - rows, 0, 0]
        padded = (blocks, batch, apart, columns, block)
        found = layout.add("Pad", [found, layout.constant(more)], shape=padded)
    high = batch and batch * apart
    dims = tuple(high if size == -1 else size for size in shape)
    return layout.reshaped(found, *shape, dims=dims)
