"""Writes weights as constants of an ONNX graph: float32, or 8-bit integers with scales.

ONNX Runtime converts a small 8-bit weight to a float32 constant when it opens the graph. A larger
8-bit weight is in memory as float32 only while an operator reads it. A dense layer reads such a
weight in blocks of rows, so the whole weight is never in memory as float32.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from device_agent.runtime.onnx_runtime import LARGEST_FOLDED
from exporters.int8_scales import to_int8
from exporters.memory.onnx_footprint import is_folded

BLOCK_BYTES = 2 * LARGEST_FOLDED
"""Size of a block as float32. Blocks are so large that a session does not convert them when it
opens."""


def hold_weights(
    model: ModelProto, tensors: Mapping[str, Tensor], int8: Collection[str]
) -> set[str]:
    """Make `tensors` constants of `model` instead of inputs with the same names.

    Tensors whose names are in `int8` become 8-bit integers with scales.

    Returns:
        Names of values that the model no longer computes.
    """
    inputs = [value for value in model.graph.input if value.name not in tensors]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(
        numpy_helper.from_array(tensor.detach().contiguous().numpy(), name)
        for name, tensor in tensors.items()
        if name not in int8
    )
    dropped = set[str]()
    for name, tensor in tensors.items():
        if name in int8:
            dropped |= add_int8(model, name, tensor)
    return dropped


def add_int8(model: ModelProto, name: str, weight: Tensor) -> set[str]:
    """Let `model` compute the value `name` from the integers and scales of `weight`.

    Returns:
        Names of values that the model no longer computes.
    """
    graph = model.graph
    q, scale = to_int8(weight)
    if is_folded(q.shape):
        integers, factors = hold(graph, name, q, scale)
        number = f"{name}:number"
        cast = helper.make_node("Cast", [integers], [number], to=TensorProto.FLOAT)
        put(graph, 0, [cast, helper.make_node("Mul", [number, factors], [name])])
        return set()
    layer = dense_layer(graph, name)
    if layer is not None:
        return in_blocks(graph, name, q, scale, *layer)
    integers, factors = hold(graph, name, q, scale.reshape(-1))
    put(graph, 0, [helper.make_node("DequantizeLinear", [integers, factors], [name], axis=0)])
    return set()


def hold(graph: GraphProto, name: str, q: np.ndarray, scale: np.ndarray) -> tuple[str, str]:
    """Add the integers `q` and their scales as constants. Return both names."""
    integers, factors = f"{name}:int8", f"{name}:scale"
    graph.initializer.append(numpy_helper.from_array(q, integers))
    graph.initializer.append(numpy_helper.from_array(scale, factors))
    return integers, factors


def put(graph: GraphProto, index: int, nodes: list[NodeProto]) -> None:
    """Insert `nodes` before the node at `index`."""
    others = list(graph.node)
    del graph.node[:]
    graph.node.extend([*others[:index], *nodes, *others[index:]])


def dense_layer(graph: GraphProto, name: str) -> tuple[NodeProto, NodeProto] | None:
    """Return the Transpose and the Gemm of the layer x @ w.T + b whose weight w is `name`.

    Returns None if there is no such layer, or if other nodes read the weight.
    """
    reads = Counter(value for node in graph.node for value in node.input)
    for transposed in graph.node:
        if transposed.op_type == "Transpose" and list(transposed.input) == [name]:
            product = next((n for n in graph.node if transposed.output[0] in n.input[1:2]), None)
            alone = reads[name] == reads[transposed.output[0]] == 1
            if product is not None and alone and is_plain_product(product):
                return transposed, product
    return None


def is_plain_product(node: NodeProto) -> bool:
    """Whether `node` is a Gemm that neither scales nor transposes."""
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
    return node.op_type == "Gemm" and all(
        helper.get_attribute_value(attribute) == plain[attribute.name]
        for attribute in node.attribute
    )


def in_blocks(
    graph: GraphProto,
    name: str,
    q: np.ndarray,
    scale: np.ndarray,
    transposed: NodeProto,
    product: NodeProto,
) -> set[str]:
    """Replace a dense layer by one product for each block of rows of its weight."""
    index = list(graph.node).index(product)
    nodes, results = list[NodeProto](), list[str]()
    for number, rows in enumerate(blocks(*q.shape)):
        block, result = f"{name}:{number}", f"{product.output[0]}:{number}"
        integers, factors = hold(graph, block, q[rows], scale[rows].reshape(-1))
        nodes += [
            helper.make_node("DequantizeLinear", [integers, factors], [block], axis=0),
            helper.make_node("Gemm", [product.input[0], block], [result], transB=1),
        ]
        results.append(result)
    bias = list(product.input[2:])
    joined = f"{product.output[0]}:joined" if bias else product.output[0]
    nodes.append(helper.make_node("Concat", results, [joined], axis=1))
    if bias:
        nodes.append(helper.make_node("Add", [joined, *bias], list(product.output)))
    put(graph, index, nodes)
    graph.node.remove(product)
    graph.node.remove(transposed)
    return {name, transposed.output[0]}


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Yield ranges of rows that take at most BLOCK_BYTES as float32, or have a single row."""
    each = max(1, BLOCK_BYTES // (4 * columns))
    for number in range(math.ceil(rows / each)):
        yield slice(number * each, (number + 1) * each)
