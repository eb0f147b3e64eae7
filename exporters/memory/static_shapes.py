"""An ONNX graph for batches of a known size, and the shapes and bytes of its tensors there."""

import math
from collections.abc import Mapping

import onnx_ir as ir
from onnx import GraphProto, ModelProto, shape_inference
from onnx_ir import Value
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.optimizer import fold_constants

from profiles.errors import ExportError

SHAPE_SIZES = 32
"""Most numbers in a tensor that is itself the shape of others."""


def at_batch(model: ModelProto, batch: int) -> ir.Model:
    """A copy of `model` for this batch, with every tensor's shape."""
    fixed = ModelProto()
    fixed.CopyFrom(model)
    shapes = [value.type.tensor_type.shape for value in fixed.graph.input]
    fix_sizes(fixed.graph, {n.dim_param: batch for s in shapes for n in s.dim if n.dim_param})
    found = ir.from_proto(with_shapes(fixed))
    unknown = -1
    while True:
        # Shapes that the graph computes are constants now, and what depends on them follows: where
        # a shape is made from another such, a turn later.
        found = folded(found)
        left = sum(not known(value) for node in found.graph for value in node.outputs)
        if left in (0, unknown):
            return found
        unknown = left


def folded(model: ir.Model) -> ir.Model:
    """`model` with the shapes that follow from its constants computed, and others inferred anew.

    Tensors that such a shape makes are left, as they are where the batch is open.
    """
    fold_constants(model, output_size_limit=SHAPE_SIZES)
    RemoveUnusedNodesPass()(model)
    again = ir.to_proto(model)
    del again.graph.value_info[:]
    return ir.from_proto(with_shapes(again))


def with_shapes(model: ModelProto) -> ModelProto:
    """`model` with the shapes that onnx infers."""
    try:
        return shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except shape_inference.InferenceError:
        # Where it computes shapes itself it gets some of them wrong, as of dropout's masks.
        return shape_inference.infer_shapes(model, strict_mode=True)


def fix_sizes(graph: GraphProto, sizes: Mapping[str, int]) -> None:
    """Let the open dimensions that are named in `sizes` have these, in bodies too."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in sizes:
                size.dim_value = sizes[size.dim_param]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                fix_sizes(attribute.g, sizes)


def shape_of(value: Value | None) -> tuple[int, ...]:
    """The sizes of `value`. Raises ExportError where one is not known."""
    assert value is not None
    if not known(value):
        raise ExportError(
            f"Peak memory needs every tensor's shape; that of {value.name!r} does not follow from "
            "the batch."
        )
    assert value.shape is not None
    return value.shape.numpy()


def known(value: Value) -> bool:
    """Whether every size of `value` is a number."""
    return value.shape is not None and value.shape.is_static()


def count_of(value: Value | None) -> int:
    """How many numbers `value` holds."""
    return math.prod(shape_of(value))


def size_of(value: Value | None) -> int:
    """The size of `value`."""
    assert value is not None
    assert value.dtype is not None
    return math.ceil(count_of(value) * value.dtype.itemsize)
