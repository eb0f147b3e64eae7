"""What ONNX Runtime makes of the 8-bit weights of a graph when it opens the graph."""

import math

from onnx import ModelProto, TensorProto

from device_agent.runtime.onnx_runtime import LARGEST_FOLDED


def is_folded(shape: tuple[int, ...]) -> bool:
    """Whether a session computes a float32 weight of `shape` when it opens, and then keeps it."""
    return 4 * math.prod(shape) <= LARGEST_FOLDED


def as_opened(model: ModelProto) -> ModelProto:
    """`model` with a float32 constant in place of each product Cast(integers) * scale.

    `exporters/int8_quantization.py` writes such products. The constants have the right size, but no
    numbers of the weights.
    """
    integers = {t.name: t for t in model.graph.initializer if t.data_type == TensorProto.INT8}
    casts = {n.output[0]: n for n in model.graph.node if n.op_type == "Cast"}
    weights = {}
    for node in model.graph.node:
        cast = casts.get(node.input[0]) if node.op_type == "Mul" else None
        if cast is not None and cast.input[0] in integers:
            weights[node.output[0]] = (cast, node)
    if not weights:
        return model
    opened = ModelProto()
    opened.CopyFrom(model)
    graph = opened.graph
    gone = {name for cast, product in weights.values() for name in (*cast.input, *product.input)}
    nodes = [n for n in graph.node if n.output[0] not in gone | weights.keys()]
    tensors = [tensor for tensor in graph.initializer if tensor.name not in gone]
    for name, (cast, _) in weights.items():
        shape = integers[cast.input[0]].dims
        zeros = bytes(4 * math.prod(shape))
        tensors.append(
            TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, raw_data=zeros)
        )
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(tensors)
    return opened
