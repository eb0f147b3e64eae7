"""Makes a large weight the first factor of a product."""

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from exporters.onnx.graph_reading import transposed

LARGE = 2**18
"""From this number of elements on, transposing the result costs less than copying the weight."""
AS_IT_IS = {"alpha": 1, "beta": 1, "transA": 0, "transB": 0}
"""The attributes of a product that neither scales nor transposes."""


def put_large_factors_first(graph: ir.Graph) -> None:
    """Exchange the factors of a product of x (N, K) and a large weight.

    ONNX Runtime copies the second factor of a product into another order. If this factor is a large
    weight, the copy takes as long as the multiplication. Therefore x @ weight^T is computed as
    (weight @ x^T)^T, so that the smaller x is copied.

    Such products are x @ weight^T + bias in a layer, and x @ weight for the gradient of its input.
    If the weight of a layer is not trained, the layer is not changed: the weight may become a
    constant, which is copied only once.
    """
    trained = {value.name for value in graph.outputs}
    for node in list(graph):
        match node.op_type, *node.inputs:
            case "MatMul", ir.Value() as x, ir.Value() as weight if not node.domain:
                if weight in graph.inputs and is_large(weight) and is_batch(x):
                    swap(graph, node, [weight, x], {"transA": 1, "transB": 1})
            case "Gemm", ir.Value() as x, ir.Value() as second, ir.Value() as bias:
                inside = transposed(second)
                if inside is None or f"{inside.name}+" not in trained or not is_large(inside):
                    continue
                plain = all(
                    AS_IT_IS[key] == attribute.value for key, attribute in node.attributes.items()
                )
                if plain and is_batch(x) and bias.shape is not None and len(bias.shape) == 1:
                    swap(graph, node, [inside, x, column(graph, node, bias)], {"transB": 1})


def swap(
    graph: ir.Graph, node: ir.Node, factors: Collection[ir.Value], turn: Mapping[str, int]
) -> None:
    """Replace `node` by a Gemm of `factors` with the attributes `turn`, and a Transpose."""
    result = node.outputs[0]
    product = ir.node("Gemm", list(factors), turn)
    back = ir.node("Transpose", product.outputs, {"perm": [1, 0]})
    product.outputs[0].name, product.outputs[0].type = f"{result.name}_turned", result.type
    back.outputs[0].shape, back.outputs[0].type = result.shape, result.type
    graph.insert_before(node, [product, back])
    result.replace_all_uses_with(back.outputs[0])
    back.outputs[0].name, result.name = result.name, None
    graph.remove(node, safe=True)


def column(graph: ir.Graph, node: ir.Node, bias: ir.Value) -> ir.Value:
    """Add nodes before `node` that turn the vector `bias` into a column; return the column."""
    axis = ir.node("Constant", [], {"value": ir.tensor([1], ir.DataType.INT64)})
    upright = ir.node("Unsqueeze", [bias, axis.outputs[0]])
    upright.outputs[0].name, upright.outputs[0].type = f"{node.outputs[0].name}_bias", bias.type
    graph.insert_before(node, [axis, upright])
    return upright.outputs[0]


def is_batch(x: ir.Value) -> bool:
    """Whether `x` is a matrix with an open number of rows."""
    return x.shape is not None and len(x.shape) == 2 and not isinstance(x.shape[0], int)


def is_large(weight: ir.Value) -> bool:
    """Whether `weight` is a matrix of at least `LARGE` elements."""
    shape = None if weight.shape is None else weight.shape.dims
    if shape is None or len(shape) != 2:
        return False
    return math.prod(size if isinstance(size, int) else 0 for size in shape) >= LARGE
