"""Converts ONNX inference graphs to float16 weights, or to int8 by ONNX Runtime's quantizer.

First, ONNX Runtime optimizes the graph: it folds batch norms into convolutions. After this, there
are no weights near zero, such as variances, and each convolution is one operator to quantize.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

HALF = np.finfo(np.float16)
FEW = 64
"""Constants of fewer numbers stay float32: a cast takes more bytes than they would save."""
BATCH = 32
"""Samples of one calibration run."""


def with_float16_weights(graph: bytes) -> bytes:
    """Return the ONNX `graph` with its weights as float16, and a cast to float32 for each.

    ONNX Runtime computes the casts once, when it opens the graph. The runtime then computes in
    float32.
    """
    model = optimized(graph)
    casts = []
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype != np.float32 or values.size < FEW or np.abs(values).max() > HALF.max:
            continue
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f"{name}:float16"))
        casts.append(helper.make_node("Cast", [tensor.name], [name], to=TensorProto.FLOAT))
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*casts, *nodes])
    return compact(model)


def with_int8(graph: bytes, name: str, samples: np.ndarray) -> bytes:
    """Return the ONNX `graph` with 8-bit weights for each channel and 8-bit activations.

    The weights use only 7 of their 8 bits. Processors without VNNI add products in 16 bits. With
    all 8 bits, these sums would saturate, and results would be wrong.

    Args:
        graph: A serialized graph with constant weights.
        name: The name of its input.
        samples: Samples (n, ...) whose activations give the ranges.
    """
    from onnxruntime import quantization

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = batches(samples)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {name: batch}

    with TemporaryDirectory() as folder, without_remarks():
        before, after = Path(folder, "float32.onnx"), Path(folder, "int8.onnx")
        onnx.save(optimized(graph), before)
        quantization.quantize_static(
            before,
            after,
            Samples(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            reduce_range=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
        return compact(onnx.load(after))


def optimized(graph: bytes) -> ModelProto:
    """The ONNX `graph` with batch norms folded, by ONNX Runtime's preparation for quantization."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with TemporaryDirectory() as folder, without_remarks():
        before, after = Path(folder, "graph.onnx"), Path(folder, "optimized.onnx")
        before.write_bytes(graph)
        # Symbolic shape inference helps only transformers, and supports fewer operators.
        quant_pre_process(before, after, skip_symbolic_shape=True)
        return onnx.load(after)


def batches(samples: np.ndarray) -> Iterator[np.ndarray]:
    """Yield `samples` in parts of at most BATCH."""
    for start in range(0, len(samples), BATCH):
        yield samples[start : start + BATCH]


def compact(model: ModelProto) -> bytes:
    """Serialize `model` without texts for people, and without the zero points of biases.

    In a small model, names and unused domains take a third of the bytes of 8-bit weights. The zero
    points of weights stay, because onnxruntime 1.19 needs them, even if they are zero.
    """
    graph = model.graph
    zeros = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.INT32 and not numpy_helper.to_array(tensor).any()
    }
    for node in graph.node:
        node.name = node.doc_string = ""
        if node.op_type == "DequantizeLinear" and node.input[2:] and node.input[2] in zeros:
            del node.input[2:]
    del model.metadata_props[:], graph.value_info[:]
    if not any(holds_graph(node) for node in graph.node):
        shorten_names(model)
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    defaults = [domain for domain in model.opset_import if not domain.domain]
    del model.opset_import[:]
    model.opset_import.extend(defaults)
    model.producer_name, model.producer_version = "edgetailor", ""
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def holds_graph(node: NodeProto) -> bool:
    """Whether `node` contains a graph, such as a loop's body. Such a graph may read any value."""
    return any(attribute.HasField("g") for attribute in node.attribute)


def shorten_names(model: ModelProto) -> None:
    """Rename all values of `model` to numbers, except its inputs and outputs."""
    graph = model.graph
    fixed = {"", *(value.name for value in (*graph.input, *graph.output))}
    short: dict[str, str] = {}

    def renamed(name: str) -> str:
        return name if name in fixed else short.setdefault(name, str(len(short)))

    for tensor in graph.initializer:
        tensor.name = renamed(tensor.name)
    for node in graph.node:
        node.input[:] = map(renamed, node.input)
        node.output[:] = map(renamed, node.output)


@contextmanager
def without_remarks() -> Iterator[None]:
    """Hide the quantizer's log lines. They advise a step that `optimized` has already done."""
    root = logging.getLogger()
    before, root.level = root.level, logging.ERROR
    try:
        yield
    finally:
        root.setLevel(before)
