"""Sums and means over pixels, of images in ONNX Runtime's blocked layout."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from exporters.onnx.graph_reading import DOMAIN, POINTWISE, dims_of, whole_numbers

if TYPE_CHECKING:
    from exporters.onnx.forms.blocked_layout import BlockedLayout

LEAST_BYTES = 2**21
"""Products of smaller images are pooled: a convolution gains less than the choice costs."""


def reduction(layout: "BlockedLayout", node: Node) -> bool:
    """A sum or mean over pixels, or over pixels and samples."""
    value, axes = (*node.inputs, None)[:2]
    if value not in layout.images or value is None:
        return False
    over = sorted(axis % 4 for axis in whole_numbers(axes))
    keep = node.attributes["keepdims"].as_int()
    batch, channels, rows, columns = (size or 0 for size in dims_of(value))
    if over not in ([0, 2, 3], [2, 3]) or (keep and over == [0, 2, 3]):
        return False
    known, pixels = batch or None, rows * columns
    # The runtime's mean of blocked pixels takes less time than its sum over an axis with gaps.
    total = sum_of_products(layout, value)
    found = pooled(layout, layout.images[value]) if total is None else total
    if over == [0, 2, 3]:
        given, shape = [found, layout.constant(over)], (channels,)
        found = layout.add(node.op_type, given, {"keepdims": 0}, shape=shape)
    elif not keep:
        found = layout.reshaped(found, -1, channels, dims=(known, channels))
    summed, sums = total is not None, node.op_type == "ReduceSum"
    if summed != sums:
        number = layout.constant(np.array(pixels if sums else 1 / pixels, np.float32))
        found = layout.add("Mul", [found, number], shape=found.shape)
    found.shape = node.outputs[0].shape
    return layout.replaced(node.outputs[0], found)


def pooled(layout: "BlockedLayout", image: Value) -> Value:
    """The mean over pixels of `image` (N, C, H, W): (N, C, 1, 1)."""
    shape = (*dims_of(image)[:2], 1, 1)
    return layout.add("GlobalAveragePool", [image], shape=shape, domain=DOMAIN)


def sum_of_products(layout: "BlockedLayout", value: Value) -> Value | None:
    """The sum over pixels (N, C, 1, 1) of `value`, if it is a large product of two images.

    One of them is the kernel of a depthwise convolution of the other one, which reads each once and
    writes no product. The convolution says how many channels it has in all samples, so a graph for
    any number of samples chooses it for as many as the form is made for. None if the product is
    computed anyway, because others read it, or is small.
    """
    product = layout.images[value].producer()
    batch, channels, rows, columns = dims_of(value)
    samples = layout.batch
    if product is None or product.op_type != "Mul" or len(value.uses()) != 1:
        return None
    first, second = product.inputs
    assert first is not None
    assert second is not None
    assert channels
    assert rows
    assert columns
    if not dims_of(first) == dims_of(second) == dims_of(value) or batch not in (None, samples):
        return None
    if rows * columns == 1 or 4 * samples * channels * rows * columns < LEAST_BYTES:
        return None
    every = samples * channels
    window: Mapping[str, int | list[int]] = {
        **POINTWISE,
        "kernel_shape": [rows, columns],
        "group": every,
    }
    image, kernel, sums = (1, every, rows, columns), (every, 1, rows, columns), (1, every, 1, 1)
    if batch is not None:
        given = [layout.reshaped(first, *image), layout.reshaped(second, *kernel)]
        found = layout.add("Conv", given, window, shape=sums, domain=DOMAIN)
        return layout.reshaped(found, samples, channels, 1, 1)
    shapes = [layout.constant(shape) for shape in (image, kernel, (samples, channels, 1, 1))]
    parts = [ir.node("Reshape", pair) for pair in zip((first, second), shapes, strict=False)]
    given = [part.outputs[0] for part in parts]
    fused = ir.node("Conv", given, window, domain=DOMAIN)
    whole = ir.node("Reshape", [fused.outputs[0], shapes[2]])
    apart = ir.node("Mul", [first, second])
    mean = ir.node("GlobalAveragePool", apart.outputs, domain=DOMAIN)
    pixels = layout.constant(np.array(rows * columns, np.float32))
    total = ir.node("Mul", [mean.outputs[0], pixels])
    branches = {
        "then_branch": branch(layout, [*parts, fused, whole]),
        "else_branch": branch(layout, [apart, mean, total]),
    }
    return layout.add("If", [is_full(layout, first)], branches, shape=(None, channels, 1, 1))


def branch(layout: "BlockedLayout", nodes: Sequence[Node]) -> ir.Graph:
    """One of two ways to compute the same float32 values, the outputs of the last of `nodes`."""
    for node in nodes:
        for value in node.outputs:
            value.name, value.type = layout.new_name(), ir.TensorType(ir.DataType.FLOAT)
    return ir.Graph([], nodes[-1].outputs, nodes=nodes, name=nodes[-1].outputs[0].name)


def is_full(layout: "BlockedLayout", image: Value) -> Value:
    """Whether `image` has as many samples as the form is made for."""
    assert image.shape is not None
    count = image.shape[0]
    key = count.value if isinstance(count, ir.SymbolicDim) and count.value else image
    if key not in layout.full:
        part = {"start": 0, "end": 1}
        found = layout.add("Shape", [image], part, shape=(1,), dtype=ir.DataType.INT64)
        given = [found, layout.constant([layout.batch])]
        layout.full[key] = layout.add("Equal", given, shape=(1,), dtype=ir.DataType.BOOL)
    return layout.full[key]
