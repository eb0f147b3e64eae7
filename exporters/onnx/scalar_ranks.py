"""Gives each scalar in a graph as many axes as the tensor with which it is combined.

ONNX Runtime joins neighbouring axes of an operator's inputs into one long row only if both inputs
have these axes. For example, let w be a weight (128, 512, 3, 1). Then 0.01 * w takes 1.3 ms if 0.01
has the shape (), and 0.02 ms if it has the shape (1, 1, 1, 1) (onnxruntime 1.31.1, x86-64).
"""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

BROADCASTING = {
    *("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Mod", "Where", "And", "Or"),
    *("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"),
}


def raise_numbers(graph: ir.Graph) -> None:
    """Give one-element inputs of elementwise operators as many axes as the operator's result.

    Operators in the bodies of loops are also changed. The values stay the same.
    """
    raised: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in list(graph):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                raise_numbers(attribute.as_graph())
        shapes = [value.shape for value in node.inputs if value is not None]
        if node.op_type not in BROADCASTING or node.domain or None in shapes or is_of_gelu(node):
            continue
        rank = max(len(shape) for shape in shapes if shape is not None)
        for index, value in enumerate(node.inputs):
            if value is None or not is_number(value) or len(value.shape or ()) == rank or rank < 2:
                continue
            if (value, rank) not in raised:
                same = with_rank(value, rank, node)
                if same is None:
                    continue
                raised[value, rank] = same
            node.replace_input_with(index, raised[value, rank])


def is_of_gelu(node: ir.Node) -> bool:
    """Whether `node` reads one of the constants of GELU, x (erf(x / sqrt 2) + 1) / 2.

    ONNX Runtime fuses GELU into one operator only if these constants are scalars of shape ().
    """
    makers = [value.producer() for value in node.inputs if value is not None]
    if node.op_type == "Mul":  # it may multiply x times the sum by 1/2
        products = [maker for maker in makers if maker is not None and maker.op_type == "Mul"]
        makers = [
            value.producer()
            for product in products
            for value in product.inputs
            if value is not None
        ]
        return any(maker is not None and adds_to_erf(maker) for maker in makers)
    return adds_to_erf(node) or any(user.op_type == "Erf" for user in node.outputs[0].consumers())


def adds_to_erf(node: ir.Node) -> bool:
    """Whether `node` adds a number to the result of an error function."""
    makers = [value.producer() for value in node.inputs if value is not None]
    return node.op_type == "Add" and any(
        maker is not None and maker.op_type == "Erf" for maker in makers
    )


def is_number(value: ir.Value) -> bool:
    """Whether `value` has one element for every batch size."""
    return value.shape is not None and all(size == 1 for size in value.shape.dims)


def with_rank(value: ir.Value, rank: int, reader: ir.Node) -> ir.Value | None:
    """Return `value` with the shape (1, ..., 1), which has `rank` axes.

    A constant is stored in this shape. Any other value is reshaped before `reader`. Returns None if
    `value` is computed outside of the reader's graph.
    """
    graph = reader.graph
    assert isinstance(graph, ir.Graph)
    # A body must not repeat names of the graph around it.
    name = f"{graph.name}_{value.name}_rank_{rank}"
    known = ir.convenience.get_const_tensor(value)
    if known is not None:
        return constant(graph, known.numpy().reshape([1] * rank), name)
    producer = value.producer()
    if value not in graph.inputs and (producer is None or producer.graph is not graph):
        return None
    shape = constant(graph, np.ones(rank, np.int64), f"{name}_shape")
    node = ir.node("Reshape", [value, shape])
    graph.insert_before(reader, node)
    result = node.outputs[0]
    result.name, result.shape, result.type = name, ir.Shape([1] * rank), value.type
    return result


def constant(graph: ir.Graph, array: NDArray[Any], name: str) -> ir.Value:
    """Add the constant `array` to `graph` and return its value."""
    value = ir.val(name, const_value=ir.tensor(array))
    graph.register_initializer(value)
    return value
