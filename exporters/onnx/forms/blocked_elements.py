"""Elementwise operators and sums over pixels, on images in ONNX Runtime's blocked layout."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from exporters.onnx.graph_reading import DOMAIN, Dims, dims_of, whole_numbers

if TYPE_CHECKING:
    from exporters.onnx.forms.blocked_layout import BlockedLayout

UNARY = {
    *("Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Neg", "Abs", "Reciprocal", "Erf", "Sign"),
    *("Cast", "Clip", "HardSigmoid", "HardSwish", "Not"),
}
ELEMENTWISE = {
    *("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Where", "And", "Or"),
    *("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"),
}
LONGEST_RUN = 64
"""Most pixels for which a vector is repeated."""


def unary(layout: "BlockedLayout", node: Node) -> bool:
    """An operator on single elements of its first input."""
    value, *rest = node.inputs
    result = node.outputs[0]
    if value not in layout.images or not layout.fits(result):
        return False
    copy = like(layout, node, [layout.images[value], *rest], result.shape)
    return layout.computed(result, copy)


def like(
    layout: "BlockedLayout",
    node: Node,
    inputs: Sequence[Value | None],
    shape: ir.Shape | Dims | None,
) -> Value:
    """A copy of `node` with other inputs."""
    attributes = {key: one.value for key, one in node.attributes.items()}
    return layout.add(node.op_type, inputs, attributes, shape=shape, dtype=node.outputs[0].dtype)


def elementwise(layout: "BlockedLayout", node: Node) -> bool:
    """An operator on the elements of images, numbers and vectors that repeat over pixels."""
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
        given = [layout.image(v) if v in images and v else v for v in node.inputs]
        return layout.computed(result, like(layout, node, given, result.shape))
    (first, *_), vector = images, vectors[0]
    assert first is not None
    assert vector is not None
    whole = dims_of(vector)[:-3] in ((), (1,)) and len(node.inputs) == 2
    ordered = first is node.inputs[0] and node.op_type == "Sub"
    if whole and (ordered or node.op_type in ("Mul", "Add")):
        flat = layout.reshaped(layout.plain(vector), int(channels or 0))
        if node.op_type == "Sub":
            flat = layout.add("Neg", [flat], shape=flat.shape)
        given = [flat] if node.op_type == "Mul" else [None, flat]
        return layout.computed(result, layout.by_channel(result, layout.image(first), *given))
    return in_runs(layout, node, images, vectors)


def in_runs(
    layout: "BlockedLayout",
    node: Node,
    images: Sequence[Value | None],
    vectors: Sequence[Value | None],
) -> bool:
    """An operator on `images` and on `vectors` of each sample, which repeat over pixels."""
    result = node.outputs[0]
    batch, channels, *sizes = (int(size or 0) for size in dims_of(result))
    pixels, known = math.prod(sizes), batch or None
    longest = min(max(1, pixels // 2), LONGEST_RUN)
    run = next(count for count in range(longest, 0, -1) if pixels % count == 0)
    shape = (channels // layout.block, pixels // run, run * layout.block)
    given: list[Value | None] = []
    for value in node.inputs:
        if value is not None and value in images:
            image = layout.image(value)
            given.append(layout.reshaped(image, -1, *shape, dims=(known, *shape)))
        elif value is not None and value in vectors:
            given.append(repeated(layout, value, run))
        else:
            given.append(value)
    found = like(layout, node, given, (known, *shape))
    found = layout.reshaped(found, -1, channels, *sizes, dims=result.shape)
    return layout.computed(result, found)


def repeated(layout: "BlockedLayout", vector: Value, pixels: int) -> Value:
    """A `vector` (N, C, 1, 1) for as many `pixels` side by side: (N, C / b, 1, pixels * b).

    The runtime computes with rows, and those of b numbers are too short for it.
    """
    *batch, channels, _, _ = (size and int(size) for size in dims_of(vector))
    known, blocks = batch[0] if batch else 1, (channels or 0) // layout.block
    each, rows = (blocks, 1, layout.block), (blocks, pixels, layout.block)
    found = layout.reshaped(layout.plain(vector), -1, *each, dims=(known, *each))
    if pixels > 1:
        times = layout.constant([1, 1, pixels, 1])
        found = layout.add("Expand", [found, times], shape=(known, *rows))
    row = (blocks, 1, pixels * layout.block)
    return layout.reshaped(found, -1, *row, dims=(known, *row))


def reduction(layout: "BlockedLayout", node: Node) -> bool:
    """A sum or mean over pixels, or over pixels and samples."""
    value, axes = (*node.inputs, None)[:2]
    if value not in layout.images or value is None:
        return False
    over, keep = whole_numbers(axes), node.attributes["keepdims"].as_int()
    batch, channels, rows, columns = (size or 0 for size in dims_of(value))
    if over not in ([0, 2, 3], [2, 3]) or (keep and over == [0, 2, 3]):
        return False
    known = batch or None
    # The runtime's mean of blocked pixels takes less time than its sum over an axis with gaps.
    found = layout.add(
        "GlobalAveragePool",
        [layout.images[value]],
        shape=(known, channels, 1, 1),
        domain=DOMAIN,
    )
    if over == [0, 2, 3]:
        given, shape = [found, layout.constant(over)], (channels,)
        found = layout.add(node.op_type, given, {"keepdims": 0}, shape=shape)
    elif not keep:
        found = layout.reshaped(found, -1, channels, dims=(known, channels))
    if node.op_type == "ReduceSum":
        pixels = layout.constant(np.array(rows * columns, np.float32))
        found = layout.add("Mul", [found, pixels], shape=found.shape)
    found.shape = node.outputs[0].shape
    return layout.replaced(node.outputs[0], found)
