"""Makes a memory plan of a TFLite subgraph, with tensor sizes as expressions of the batch."""

from collections.abc import Collection

import sympy
from ai_edge_litert import schema_py_generated as schema

from exporters.memory.tflite_footprint import (
    BATCH,
    Expression,
    MemoryPlan,
    PlannedCall,
    PlannedTensor,
)
from exporters.tflite.flatbuffer import Subgraph

WIDTHS = {
    schema.TensorType.FLOAT32: 4,
    schema.TensorType.INT64: 8,
    schema.TensorType.INT32: 4,
    schema.TensorType.BOOL: 1,
}


def plan_of(subgraph: Subgraph, file_operators: int = 0, over: Collection[str] = ()) -> MemoryPlan:
    """Make the memory plan of `subgraph` and of the subgraphs that it calls.

    `file_operators` is the number of operators in the file. `over` names the outputs that the agent
    copies over inputs.
    """
    parts = list({id(part): part for _, part in subgraph.calls}.values())
    indices = {id(part): index for index, part in enumerate(parts)}
    called = {id(options): indices[id(part)] for options, part in subgraph.calls}
    return MemoryPlan(
        tensors=tuple(
            PlannedTensor(tensor.name, WIDTHS[tensor.type], expression(sympy.prod(shape)))
            for tensor, shape in zip(subgraph.tensors, subgraph.shapes, strict=True)
        ),
        operators=tuple(
            PlannedCall(
                tuple(operator.inputs.tolist()),
                tuple(operator.outputs.tolist()),
                called.get(id(operator.builtinOptions)),
            )
            for _, operator in subgraph.operators
        ),
        inputs=tuple(tensor.index for tensor in subgraph.inputs.values()),
        outputs=tuple(tensor.index for tensor in subgraph.outputs.values()),
        parts=tuple(map(plan_of, parts)),
        file_operators=file_operators,
        over={name: subgraph.outputs[name].index for name in over},
    )


def expression(size: int | sympy.Expr) -> Expression:
    """Return `size` as nested tuples of numbers and names. The only symbol is the batch."""
    size = sympy.sympify(size)
    if size.is_Symbol:
        return BATCH
    if size.is_Integer:
        return int(size)
    if size.is_Rational:
        return ("Rational", int(size.p), int(size.q))
    return (type(size).__name__, *map(expression, size.args))
