"""Operators that pool or move pixels, on images in ONNX Runtime's blocked layout.

These operators read an image as (N, C / b, H, W, b), and move rows of b channels.
"""

from collections.abc import Callable, Mapping, Sequence

from onnx_ir import Node, Value

from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import CHANNELS_LAST, DOMAIN, dims_of, sizes_of, whole_numbers

PIXEL_AXES = {2, 3}
"""The axes of rows and columns, in plain and in blocked form."""


def max_pool(layout: BlockedValues, node: Node) -> bool:
    """Convert max pooling, if no node reads the positions of the maxima."""
    value, result = node.inputs[0], node.outputs[0]
    if (
        value is None
        or value not in layout.images
        or not layout.fits(result)
        or len(node.outputs) > 1
    ):
        return False
    ceil = node.attributes.get("ceil_mode")
    if ceil is not None and ceil.as_int() != 0:
        return False
    kinds = ("kernel_shape", "strides", "pads", "dilations")
    window = {kind: node.attributes[kind].as_ints() for kind in kinds if kind in node.attributes}
    image = layout.add("MaxPool", [layout.image(value)], window, shape=result.shape, domain=DOMAIN)
    return layout.computed(result, image)


def concatenation(layout: BlockedValues, node: Node) -> bool:
    """Convert a concatenation of images along channels, rows or columns."""
    axis, values = node.attributes["axis"].as_int(), [v for v in node.inputs if v is not None]
    ready = all(value in layout.images for value in values)
    if not all(map(layout.fits, values)) or not (axis == 1 or (axis in PIXEL_AXES and ready)):
        return False
    given = [layout.apart(value, layout.image(value)) for value in values]
    return moved(layout, node, given, {"axis": axis})


def part(layout: BlockedValues, node: Node) -> bool:
    """Convert a slice of the rows or columns of an image."""
    value, *given = node.inputs
    axes = whole_numbers(given[2]) if len(given) > 2 else []
    if value not in layout.images or not axes or not PIXEL_AXES.issuperset(axes):
        return False
    return moved(layout, node, [layout.apart(value, layout.image(value)), *given], {})


def frame(layout: BlockedValues, node: Node) -> bool:
    """Convert padding of an image's rows and columns. Negative padding crops the image."""
    value, pads, *filling = node.inputs
    around = whole_numbers(pads)
    if value not in layout.images or len(node.inputs) > 3 or len(around) != 8:
        return False
    if any(around[axis] for axis in (0, 1, 4, 5)):
        return False
    more = layout.constant([*around[:4], 0, *around[4:], 0])
    image = layout.apart(value, layout.image(value))
    return moved(layout, node, [image, more, *filling], {"mode": "constant"})


def other_rows(layout: BlockedValues, node: Node) -> bool:
    """Convert a reshape of an image to rows of another length.

    A reshape to a single axis is also converted if only a Gather reads the result.
    """
    value, result = node.inputs[0], node.outputs[0]
    if value not in layout.images:
        return False
    image = layout.image(value)
    # Such a Gather is for a choice between equal values (`state_in_place.py`): any order will do.
    flat = whole_numbers(node.inputs[1]) == [-1]
    if flat and {reader.op_type for reader in result.consumers()} == {"Gather"}:
        return layout.replaced(result, layout.reshaped(image, -1, dims=result.shape))
    (_, channels, high, wide), sizes = sizes_of(value), sizes_of(result)[1:]
    if not layout.fits(result) or sizes[0] != channels or sizes[1] * sizes[2] != high * wide:
        return False
    return layout.computed(result, layout.reshaped(image, -1, *sizes, dims=result.shape))


def with_zeros_between(layout: BlockedValues, image: Value, steps: Sequence[int]) -> Value:
    """Put zeros behind each pixel of a blocked `image` (N, C, H, W): (N, C, H * step, W * step)."""
    batch, (_, channels, high, columns) = dims_of(image)[0], sizes_of(image)
    block, (down, along) = layout.block, steps
    count = batch and batch * channels // block * high
    apart = layout.reshaped(image, -1, 1, columns, 1, block, dims=(count, 1, columns, 1, block))
    wider = layout.padded(apart, *[0] * 6, down - 1, 0, along - 1, 0)
    sizes = (channels, high * down, columns * along)
    return layout.reshaped(wider, -1, *sizes, dims=(batch, *sizes))


def moved(
    layout: BlockedValues,
    node: Node,
    inputs: Sequence[Value | None],
    attributes: Mapping[str, object],
) -> bool:
    """Convert `node` to the same operator with `inputs` of the shape (N, C / b, H, W, b)."""
    result = node.outputs[0]
    if not layout.fits(result):
        return False
    batch, (_, channels, high, wide) = dims_of(result)[0], sizes_of(result)
    shape = (batch, channels // layout.block, high, wide, layout.block)
    apart = layout.add(node.op_type, inputs, attributes, shape=shape, dtype=result.dtype)
    image = layout.reshaped(apart, -1, channels, high, wide, dims=result.shape)
    return layout.computed(result, image)


def channels_last(layout: BlockedValues, node: Node) -> bool:
    """Convert a permutation to (N, H, W, C). The blocked form moves whole rows of b channels."""
    (value,) = node.inputs
    axes = tuple(node.attributes["perm"].as_ints())
    if value is None or value not in layout.images or axes != CHANNELS_LAST:
        return False
    rows = layout.permuted(layout.apart(value, layout.images[value]), 0, 2, 3, 1, 4)
    result = node.outputs[0]
    plain = layout.reshaped(rows, -1, *sizes_of(result)[1:], dims=result.shape)
    return layout.replaced(result, plain)


PIXELS: dict[str, Callable[[BlockedValues, Node], bool]] = {
    "Concat": concatenation,
    "MaxPool": max_pool,
    "Pad": frame,
    "Reshape": other_rows,
    "Slice": part,
    "Transpose": channels_last,
}
"""For each operator, the rule that converts a node; it returns False if the node has to stay."""
