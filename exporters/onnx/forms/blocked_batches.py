"""The parts of a blocked form that depend on the number of samples in a batch."""

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir import Value

from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import Dims, dims_of

WHOLE = ir.DataType.INT64
Way = Callable[[], Value]
"""Adds the nodes that compute a value, and returns the value."""


def by_batch(layout: BlockedValues, image: Value, shape: Dims, full: Way, any_batch: Way) -> Value:
    """If `image` has `layout.batch` samples, compute a value by `full`; else by `any_batch`.

    `full` may work only for this number of samples. For example, `full` may treat each channel of
    each sample as a channel of one image. If the graph accepts any number of samples, an If
    operator contains the nodes of both ways and chooses a way at run time. The result has the shape
    `shape`. Both ways may read blocked forms of images, which must exist before the call.
    """
    batch = dims_of(image)[0]
    if batch is not None:
        return full() if batch == layout.batch else any_batch()
    branches = {"then_branch": branch(layout, full), "else_branch": branch(layout, any_batch)}
    return layout.add("If", [is_full(layout, image)], branches, shape=shape)


def branch(layout: BlockedValues, way: Way) -> ir.Graph:
    """Return a graph of the nodes that `way` adds. Its only output is the value that `way` returns.

    The nodes may read values of the enclosing graph.
    """
    around = layout.nodes, layout.views, layout.from_lengths
    layout.nodes, layout.views = [], dict(layout.views)
    layout.from_lengths = dict(layout.from_lengths)
    value = way()
    graph = ir.Graph([], [value], nodes=layout.nodes, name=value.name)
    layout.nodes, layout.views, layout.from_lengths = around
    return graph


def is_full(layout: BlockedValues, image: Value) -> Value:
    """Return a value of the graph that is true if `image` has `layout.batch` samples."""
    key = ("full", batch_of(layout, image))
    if key not in layout.from_lengths:
        inputs = [count_of(layout, image, 0), layout.constant([layout.batch])]
        layout.from_lengths[key] = layout.add("Equal", inputs, shape=(1,), dtype=ir.DataType.BOOL)
    return layout.from_lengths[key]


def batch_of(layout: BlockedValues, *values: Value) -> object:
    """Return a key for the batch size of `values`, which must all have the same batch size.

    Equal keys mean equal batch sizes. If the batch size of one of `values` also occurs in the shape
    of a graph input, this size is the key. Otherwise the key is the first value itself.
    """
    lengths = [value.shape[0] for value in values if value.shape is not None]
    return next((length for length in lengths if length in layout.lengths), values[0])


def count_of(layout: BlockedValues, value: Value, axis: int) -> Value:
    """The length of `value` along `axis`, as a tensor (1,)."""
    part = {"start": axis, "end": axis + 1}
    return layout.add("Shape", [value], part, shape=(1,), dtype=WHOLE)


def filled(count: int | None, unit: int) -> int | None:
    """Round `count` up to a multiple of `unit`. Returns None if `count` is not known."""
    return None if count is None else -(-count // unit) * unit
