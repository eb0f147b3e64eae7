"""Operators that pool or move pixels, on images in ONNX Runtime's blocked layout.

They read an image as (N, C / b, H, W, b), and move rows of b channels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from onnx_ir import Node, Value

from exporters.onnx.graph_reading import CHANNELS_LAST, DOMAIN, dims_of, whole_numbers

if TYPE_CHECKING:
    from exporters.onnx.forms.blocked_layout import BlockedLayout

PLACES = {2, 3}
"""The axes of rows and columns, in plain and in blocked form."""


def max_pool(layout: "BlockedLayout", node: Node) -> bool:
    """Max pooling, if nobody reads where the maxima are."""
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
    found = layout.add("MaxPool", [layout.image(value)], window, shape=result.shape, domain=DOMAIN)
    return layout.computed(result, found)


def concatenation(layout: "BlockedLayout", node: Node) -> bool:
    """Images one behind the other, by channels, rows or columns."""
    axis, values = node.attributes["axis"].as_int(), [v for v in node.inputs if v is not None]
    ready = all(value in layout.images for value in values)
    if not all(map(layout.fits, values)) or not (axis == 1 or (axis in PLACES and ready)):
        return False
    given = [layout.apart(value, layout.image(value)) for value in values]
    return moved(layout, node, given, {"axis": axis})


def part(layout: "BlockedLayout", node: Node) -> bool:
    """Some rows or columns of an image."""
    value, *given = node.inputs
    axes = whole_numbers(given[2]) if len(given) > 2 else []
    if value not in layout.images or not axes or not PLACES.issuperset(axes):
        return False
    return moved(layout, node, [layout.apart(value, layout.image(value)), *given], {})


def frame(layout: "BlockedLayout", node: Node) -> bool:
    """Rows and columns around an image, or fewer."""
    value, pads, *filling = node.inputs
    around = whole_numbers(pads)
    if value not in layout.images or len(node.inputs) > 3 or len(around) != 8:
        return False
    if any(around[axis] for axis in (0, 1, 4, 5)):
        return False
    more = layout.constant([*around[:4], 0, *around[4:], 0])
    image = layout.apart(value, layout.image(value))
    return moved(layout, node, [image, more, *filling], {"mode": "constant"})


def other_rows(layout: "BlockedLayout", node: Node) -> bool:
    """The same pixels in rows of another length; or all numbers, of which nobody reads many."""
    value, result = node.inputs[0], node.outputs[0]
    if value not in layout.images:
        return False
    image = layout.image(value)
    # A choice between equal values reads them; see `state_in_place.py`.
    flat = whole_numbers(node.inputs[1]) == [-1]
    if flat and {reader.op_type for reader in result.consumers()} == {"Gather"}:
        return layout.replaced(result, layout.reshaped(image, -1, dims=result.shape))
    (_, channels, *old), (_, *size) = dims_of(value), (dims_of(result) or (None,))
    sizes = [int(length or 0) for length in size]
    pixels = int(old[0] or 0) * int(old[1] or 0)
    if not layout.fits(result) or sizes[0] != channels or sizes[1] * sizes[2] != pixels:
        return False
    return layout.computed(result, layout.reshaped(image, -1, *sizes, dims=result.shape))


def with_zeros_between(layout: "BlockedLayout", image: Value, steps: Sequence[int]) -> Value:
    """The blocked `image` (N, C, H, W) with zeros behind each pixel: (N, C, H * step, W * step)."""
    batch, channels, high, wide = (size and int(size) for size in dims_of(image))
    block, (down, along) = layout.block, steps
    count = batch and batch * int(channels or 0) // block * int(high or 0)
    columns = int(wide or 0)
    apart = layout.reshaped(image, -1, 1, columns, 1, block, dims=(count, 1, columns, 1, block))
    wider = layout.padded(apart, *[0] * 6, down - 1, 0, along - 1, 0)
    sizes = (int(channels or 0), int(high or 0) * down, columns * along)
    return layout.reshaped(wider, -1, *sizes, dims=(batch, *sizes))


def moved(
    layout: "BlockedLayout",
    node: Node,
    inputs: Sequence[Value | None],
    attributes: Mapping[str, object],
) -> bool:
    """Let `node` work on inputs (N, C / b, H, W, b)."""
    result = node.outputs[0]
    if not layout.fits(result):
        return False
    batch, channels, high, wide = dims_of(result)
    shape = (batch, int(channels or 0) // layout.block, high, wide, layout.block)
    found = layout.add(node.op_type, inputs, attributes, shape=shape, dtype=result.dtype)
    sizes = [int(size or 0) for size in dims_of(result)[1:]]
    return layout.computed(result, layout.reshaped(found, -1, *sizes, dims=result.shape))


def channels_last(layout: "BlockedLayout", node: Node) -> bool:
    """The permutation to (N, H, W, C); its last axis stays a row of b channels."""
    (value,) = node.inputs
    axes = tuple(node.attributes["perm"].as_ints())
    if value is None or value not in layout.images or axes != CHANNELS_LAST:
        return False
    rows = layout.permuted(layout.apart(value, layout.images[value]), 0, 2, 3, 1, 4)
    shape = [int(size or 0) for size in dims_of(node.outputs[0])[1:]]
    found = layout.reshaped(rows, -1, *shape, dims=node.outputs[0].shape)
    return layout.replaced(node.outputs[0], found)


PIXELS: dict[str, Callable[["BlockedLayout", Node], bool]] = {
    "Concat": concatenation,
    "MaxPool": max_pool,
    "Pad": frame,
    "Reshape": other_rows,
    "Slice": part,
    "Transpose": channels_last,
}
"""What computes such a node on blocked images; False if it has to stay."""
