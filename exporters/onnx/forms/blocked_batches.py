"""What a blocked form computes with the number of samples of a batch, or chooses by it."""

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir import Value

from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import Dims, dims_of

WHOLE = ir.DataType.INT64
Way = Callable[[], Value]
"""Adds what computes a value."""


def by_batch(layout: BlockedValues, image: Value, shape: Dims, full: Way, any_batch: Way) -> Value:
    """What `full` adds if `image` has as many samples as the form is made for, else `any_batch`.

    An operator that counts channels over all samples, for example, is right for one number of
    samples only. A graph for any number has both ways, in the branches of an If with a result of
    this `shape`. The blocked forms of images that they read must be there before.
    """
    batch = dims_of(image)[0]
    if batch is not None:
        return full() if batch == layout.batch else any_batch()
    branches = {"then_branch": branch(layout, full), "else_branch": branch(layout, any_batch)}
    return layout.add("If", [is_full(layout, image)], branches, shape=shape)


def branch(layout: BlockedValues, way: Way) -> ir.Graph:
    """What `way` adds, as a graph: it reads values around it, and only its result is read there."""
    around = layout.nodes, layout.views, layout.from_lengths
    layout.nodes, layout.views = [], dict(layout.views)
    layout.from_lengths = dict(layout.from_lengths)
    value = way()
    graph = ir.Graph([], [value], nodes=layout.nodes, name=value.name)
    layout.nodes, layout.views, layout.from_lengths = around
    return graph


def is_full(layout: BlockedValues, image: Value) -> Value:
    """Whether `image` has as many samples as the form is made for."""
    key = ("full", batch_of(layout, image))
    if key not in layout.from_lengths:
        given = [count_of(layout, image, 0), layout.constant([layout.batch])]
        layout.from_lengths[key] = layout.add("Equal", given, shape=(1,), dtype=ir.DataType.BOOL)
    return layout.from_lengths[key]


def batch_of(layout: BlockedValues, *values: Value) -> object:
    """What stands for the number of samples of `values`, which have the same.

    Two numbers are known to be equal if they are those of the same input.
    """
    lengths = [value.shape[0] for value in values if value.shape is not None]
    return next((length for length in lengths if length in layout.lengths), values[0])


def count_of(layout: BlockedValues, value: Value, axis: int) -> Value:
    """The length of `value` along `axis`, (1,)."""
    part = {"start": axis, "end": axis + 1}
    return layout.add("Shape", [value], part, shape=(1,), dtype=WHOLE)


def filled(count: int | None, unit: int) -> int | None:
    """The next multiple of `unit`; None if the `count` is not known."""
    return None if count is None else -(-count // unit) * unit
