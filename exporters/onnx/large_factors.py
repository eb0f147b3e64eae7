"""Lets a large weight be the first factor of a product."""

import math

import onnx_ir as ir

LARGE = 2**18
"""Number of elements from which a transposition of the result costs less."""


def put_large_factors_first(graph: ir.Graph) -> None:
    """Compute x @ weight as the transpose of weight^T @ x^T, for x (N, K) and a large weight.

    ONNX Runtime copies the second factor of a product into an order of its own. For a batch and a
    large weight this takes as long as multiplying.
    """
    for node in list(graph):
        if node.op_type != "MatMul" or node.domain:
            continue
        x, weight = node.inputs
        result = node.outputs[0]
        if x is None or weight not in graph.inputs or not is_large(weight):
            continue
        if x.shape is None or len(x.shape) != 2 or isinstance(x.shape[0], int):
            continue
        product = ir.node("Gemm", [weight, x], {"transA": 1, "transB": 1})
        turn = ir.node("Transpose", product.outputs, {"perm": [1, 0]})
        product.outputs[0].name, product.outputs[0].type = f"{result.name}_turned", result.type
        turn.outputs[0].shape, turn.outputs[0].type = result.shape, result.type
        graph.insert_before(node, [product, turn])
        result.replace_all_uses_with(turn.outputs[0])
        turn.outputs[0].name, result.name = result.name, None
        graph.remove(node, safe=True)


def is_large(weight: ir.Value | None) -> bool:
    """Whether `weight` is a matrix of at least `LARGE` elements."""
    shape = None if weight is None or weight.shape is None else weight.shape.dims
    if shape is None or len(shape) != 2:
        return False
    return math.prod(size if isinstance(size, int) else 0 for size in shape) >= LARGE
