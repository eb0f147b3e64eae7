"""Converts elementwise operators on images to ONNX Runtime's blocked layout."""

import math
from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir import Node, Value

from exporters.onnx.forms.blocked_convolutions import vector_sum
from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import Dims, dims_of, is_all, sizes_of, value_of
from exporters.programs.seeded_random import PRIME

UNARY = {
    *("Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Neg", "Abs", "Reciprocal", "Erf", "Sign"),
    *("Cast", "Clip", "HardSigmoid", "HardSwish", "Not"),
}
ELEMENTWISE = {
    *("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Where", "And", "Or"),
    *("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"),
}
SLOPES = {"Greater": 1.0, "Less": -1.0}
"""Comparisons, with 1 if their mask rises at the limit, and -1 if it falls."""
LARGEST = 127
"""The largest exponent of a float32."""
LEAST_LIMIT = 2.0**-100
"""Float32 numbers next to a smaller limit, except 0, are closer to it than 1 / slope."""
LONGEST_RUN = 64
"""The largest number of pixels for which a vector is repeated."""


def unary(layout: BlockedValues, node: Node) -> bool:
    """Convert an operator on single elements of its first input."""
    value, *rest = node.inputs
    result = node.outputs[0]
    if value not in layout.images or not layout.fits(result):
        return False
    if (image := mask(layout, node)) is not None:
        return layout.computed(result, image)
    copy = like(layout, node, [layout.images[value], *rest], result.shape)
    return layout.computed(result, copy)


def mask(layout: BlockedValues, node: Node) -> Value | None:
    """Convert a cast of image > number or image < number to float32. Returns None for other casts.

    A hard sigmoid computes the mask of 0 and 1 in one pass. A comparison and a cast would take two
    passes, and ONNX Runtime casts with one thread.
    """
    compared, result = node.inputs[0], node.outputs[0]
    maker = layout.images[compared].producer() if compared is not None else None
    if maker is None or maker.op_type not in SLOPES or result.dtype != ir.DataType.FLOAT:
        return None
    image, limit = maker.inputs[0], value_of(maker.inputs[1])
    line = None if limit is None or limit.size != 1 else steep_line(float(limit.item()))
    if line is None or dims_of(image) != dims_of(result):
        return None
    slope, offset = (SLOPES[maker.op_type] * number for number in line)
    return layout.add("HardSigmoid", [image], {"alpha": slope, "beta": offset}, shape=result.shape)


def steep_line(limit: float) -> tuple[float, float] | None:
    """Return the slope and the offset of a line that is at least 1 for every float32 above `limit`.

    For all other float32 numbers, the line is at most 0. The slope is a power of two, so products
    with it are exact, and slope * limit is finite. For the limit 0, subnormal numbers can give
    values between 0 and 1. Returns None if there is no such line.

    >>> steep_line(3.0) == (2.0**125, -3 * 2.0**125)
    True
    """
    if not math.isfinite(limit) or 0 < abs(limit) < LEAST_LIMIT:
        return None
    slope = 2.0 ** (LARGEST - max(math.frexp(limit)[1], 0))
    return slope, -slope * limit


def like(
    layout: BlockedValues,
    node: Node,
    inputs: Sequence[Value | None],
    shape: ir.Shape | Dims | None,
) -> Value:
    """Add a copy of `node` with other inputs; return its output."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return layout.add(node.op_type, inputs, attributes, shape=shape, dtype=node.outputs[0].dtype)


def elementwise(layout: BlockedValues, node: Node) -> bool:
    """Convert an elementwise operator that reads an image.

    The other operands may be images, numbers, or vectors that repeat over all pixels.
    """
    result = node.outputs[0]
    if not layout.fits(result):
        return False
    channels = dims_of(result)[1]
    vectors, images = [], []
    for value in node.inputs:
        shape = dims_of(value)
        assert value is not None
        if shape[1:] == dims_of(result)[1:] and layout.fits(value):
            if value not in layout.images and value.dtype != ir.DataType.FLOAT:
                return False
            images.append(value)
        elif shape[-3:] == (channels, 1, 1):
            vectors.append(value)
        elif math.prod(size or 0 for size in shape) != 1:
            return False
    if not any(value in layout.images for value in images):
        return False
    if not vectors:
        inputs = [layout.image(v) if v in images and v else v for v in node.inputs]
        return layout.computed(result, like(layout, node, inputs, result.shape))
    (first, *_), vector = images, vectors[0]
    assert first is not None
    assert vector is not None
    whole = dims_of(vector)[:-3] in ((), (1,)) and len(node.inputs) == 2
    ordered = first is node.inputs[0] and node.op_type == "Sub"
    if whole and (ordered or node.op_type in ("Mul", "Add")):
        flat = layout.reshaped(layout.plain(vector), sizes_of(result)[1])
        if node.op_type == "Sub":
            flat = layout.add("Neg", [flat], shape=flat.shape)
        if node.op_type != "Mul" and vector_sum(layout, node, first, flat):
            return True
        inputs = [flat] if node.op_type == "Mul" else [None, flat]
        return layout.computed(result, layout.by_channel(result, layout.image(first), *inputs))
    return in_runs(layout, node, images, vectors)


def product_with_mask(layout: BlockedValues, node: Node) -> bool:
    """Convert the selection of a dropout to a product of the image with the mask.

    The runtime's operator for selections, `Where`, is slower and needs memory for two more images.
    Other selections are not converted, because they may hide elements that are not finite.
    """
    kept, value, other = node.inputs
    result = node.outputs[0]
    same = dims_of(kept) == dims_of(value) == dims_of(result)
    if not (same and value in layout.images and is_all(other, 0) and keeps_at_random(kept)):
        return False
    assert value is not None
    shape, float32 = result.shape, int(ir.DataType.FLOAT)
    ones = layout.add("Cast", [kept], {"to": float32}, shape=shape)
    kept_ones = layout.in_blocks(ones)
    product = layout.add("Mul", [layout.images[value], kept_ones], shape=shape)
    return layout.computed(result, product)


def keeps_at_random(mask: Value | None) -> bool:
    """Whether `mask` is the mask of a dropout.

    Such a mask compares the random integers of `exporters/programs/seeded_random.py` with a limit.
    """
    node = mask.producer() if mask is not None else None
    if node is None or node.op_type != "GreaterOrEqual":
        return False
    while node is not None and node.op_type in ("GreaterOrEqual", "Reshape"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node is not None and node.op_type == "Mod" and is_all(node.inputs[1], PRIME)


def in_runs(
    layout: BlockedValues,
    node: Node,
    images: Sequence[Value | None],
    vectors: Sequence[Value | None],
) -> bool:
    """Convert an operator on `images` and `vectors`.

    Each vector belongs to one sample and repeats over its pixels.
    """
    result = node.outputs[0]
    batch, channels, *sizes = sizes_of(result)
    pixels, known = math.prod(sizes), batch or None
    longest = min(max(1, pixels // 2), LONGEST_RUN)
    run = next(count for count in range(longest, 0, -1) if pixels % count == 0)
    shape = (channels // layout.block, pixels // run, run * layout.block)
    inputs: list[Value | None] = []
    for value in node.inputs:
        if value is not None and value in images:
            image = layout.image(value)
            inputs.append(layout.reshaped(image, -1, *shape, dims=(known, *shape)))
        elif value is not None and value in vectors:
            inputs.append(repeated(layout, value, run))
        else:
            inputs.append(value)
    runs = like(layout, node, inputs, (known, *shape))
    image = layout.reshaped(runs, -1, channels, *sizes, dims=result.shape)
    return layout.computed(result, image)


def repeated(layout: BlockedValues, vector: Value, pixels: int) -> Value:
    """Repeat a `vector` (N, C, 1, 1) for `pixels` pixels in a row: (N, C / b, 1, pixels * b).

    The runtime computes row by row, and rows of b numbers are too short for this to be fast.
    """
    *batch, _, _, _ = dims_of(vector)
    known, blocks = batch[0] if batch else 1, sizes_of(vector)[-3] // layout.block
    each, rows = (blocks, 1, layout.block), (blocks, pixels, layout.block)
    blocked = layout.reshaped(layout.plain(vector), -1, *each, dims=(known, *each))
    if pixels > 1:
        times = layout.constant([1, 1, pixels, 1])
        blocked = layout.add("Expand", [blocked, times], shape=(known, *rows))
    row = (blocks, 1, pixels * layout.block)
    return layout.reshaped(blocked, -1, *row, dims=(known, *row))
