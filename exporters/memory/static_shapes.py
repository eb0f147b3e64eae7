"""Shapes and sizes of all tensors of an ONNX graph for a fixed batch."""

import math
from collections.abc import Mapping

import onnx_ir as ir
from onnx import GraphProto, ModelProto, shape_inference
from onnx_ir import Value
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.optimizer import fold_constants

from profiles.errors import ExportError

SHAPE_SIZES = 32
"""Tensors with more elements are not folded. The shape of a tensor has one element per axis."""


def at_batch(model: ModelProto, batch: int) -> ir.Model:
    """Return a copy of `model` for this batch size, with all shapes that can be inferred."""
    fixed = ModelProto()
    fixed.CopyFrom(model)
    shapes = [value.type.tensor_type.shape for value in fixed.graph.input]
    fix_sizes(fixed.graph, {n.dim_param: batch for s in shapes for n in s.dim if n.dim_param})
    # Waits read flattened tensors, of which data propagation would make an object for each number.
    sized = inferred(without_waits(ir.from_proto(fixed)))
    unknown = -1
    while True:
        # Folding turns shapes that the graph computes into constants. From these, more shapes can
        # be inferred. A shape that depends on another computed shape needs one more iteration.
        sized = folded(sized)
        left = sum(not known(value) for node in sized.graph for value in node.outputs)
        if left in (0, unknown):
            return sized
        unknown = left


def without_waits(model: ir.Model) -> ir.Model:
    """Remove the nodes of `model` that only make other nodes wait; see `onnx/state_in_place.py`."""
    for node in model.graph:
        same = node.inputs[1] if node.op_type == "Where" else None
        if same is not None and same is node.inputs[2]:
            node.outputs[0].replace_all_uses_with(same)
    RemoveUnusedNodesPass()(model)
    return model


def folded(model: ir.Model) -> ir.Model:
    """Replace the shapes that `model` computes by constants, and infer all shapes again.

    Larger computed tensors are not replaced, because a graph with an open batch size computes them
    in each run.
    """
    fold_constants(model, output_size_limit=SHAPE_SIZES)
    RemoveUnusedNodesPass()(model)
    return inferred(model)


def inferred(model: ir.Model) -> ir.Model:
    """Return a copy of `model` that has only the shapes that onnx infers."""
    again = ir.to_proto(model)
    del again.graph.value_info[:]
    return ir.from_proto(with_shapes(again))


def with_shapes(model: ModelProto) -> ModelProto:
    """Return `model` with the shapes that onnx infers."""
    try:
        return shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except shape_inference.InferenceError:
        # With data propagation, onnx infers some shapes wrongly, for example of dropout's masks.
        return shape_inference.infer_shapes(model, strict_mode=True)


def fix_sizes(graph: GraphProto, sizes: Mapping[str, int]) -> None:
    """Set the open dimensions named in `sizes` to these numbers, also in the bodies of loops."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in sizes:
                size.dim_value = sizes[size.dim_param]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                fix_sizes(attribute.g, sizes)


def shape_of(value: Value | None) -> tuple[int, ...]:
    """The shape of `value`. Raises ExportError if it is unknown."""
    assert value is not None
    if not known(value):
        raise ExportError(
            "Peak memory can be predicted only if the batch size determines the shape of every "
            "tensor. It does not determine the shape of {tensor!r}.",
            code="export.unknown-shape",
            tensor=value.name,
        )
    assert value.shape is not None
    return value.shape.numpy()


def known(value: Value) -> bool:
    """Whether every dimension of `value` is a number."""
    return value.shape is not None and value.shape.is_static()


def count_of(value: Value | None) -> int:
    """The number of elements of `value`."""
    return math.prod(shape_of(value))


def size_of(value: Value | None) -> int:
    """The size of `value` in bytes."""
    assert value is not None
    assert value.dtype is not None
    return math.ceil(count_of(value) * value.dtype.itemsize)
