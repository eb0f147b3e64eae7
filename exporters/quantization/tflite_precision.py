"""Converts TFLite inference graphs to float16 weights or int8, with ai-edge-quantizer."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_quantizer import qtyping, quantizer, recipe
from ai_edge_quantizer.algorithm_manager import AlgorithmName

from device_agent.runtime.litert_runtime import without_remarks
from exporters.tflite.flatbuffer import IDENTIFIER

BATCH = 32
"""Samples of one calibration run."""


def with_float16_weights(graph: bytes) -> bytes:
    """Return the TFLite `graph` with its weights as float16.

    XNNPACK (LiteRT's fast library) converts the weights to float32 when it opens the graph.
    """
    half = qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT)
    run = quantizer.Quantizer(graph)
    run.update_quantization_recipe(
        regex=".*",
        operation_name=qtyping.TFLOperationName.ALL_SUPPORTED,
        op_config=qtyping.OpQuantizationConfig(
            weight_tensor_config=half,
            compute_precision=qtyping.ComputePrecision.FLOAT,
            explicit_dequantize=True,
        ),
        algorithm_key=AlgorithmName.FLOAT_CASTING,
    )
    with quiet():
        return compact(run.quantize().quantized_model)


def with_int8(graph: bytes, signature: str, name: str, samples: np.ndarray) -> bytes:
    """Return the TFLite `graph` with 8-bit weights for each channel and 8-bit activations.

    Its input and output stay float32.

    Args:
        graph: A serialized graph with constant weights.
        signature: The name of its signature.
        name: The name of the signature's input.
        samples: Samples (n, ...) whose activations give the ranges.
    """
    run = quantizer.Quantizer(graph)
    run.load_quantization_recipe(recipe.static_wi8_ai8())
    for port in (qtyping.TFLOperationName.INPUT, qtyping.TFLOperationName.OUTPUT):
        run.update_quantization_recipe(
            regex=".*", operation_name=port, algorithm_key=AlgorithmName.NO_QUANTIZE
        )
    parts = [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)]
    ranges: dict[str, dict[str, np.ndarray]] = {}
    with quiet():
        for part in parts:
            widen(ranges, run.calibrate({signature: [{name: part}]}))
        return compact(run.quantize(ranges).quantized_model)


def widen(
    ranges: dict[str, dict[str, np.ndarray]], others: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """Widen `ranges` of tensors, so that they include the ranges in `others`.

    The quantizer itself takes moving averages over batches. So activations of later batches would
    be cut off if they are outside the range of the first batch.
    """
    for name, new in others.items():
        old = ranges.setdefault(name, dict(new))
        old["min"] = np.minimum(old["min"], new["min"])
        old["max"] = np.maximum(old["max"], new["max"])


def largest_constant(graph: bytes) -> int:
    """Bytes of the largest constant of a compact TFLite `graph`."""
    model = schema.Model.GetRootAs(graph)
    return max(int(model.Buffers(n).DataLength()) for n in range(model.BuffersLength()))


class SharingBuilder(flatbuffers.Builder):  # type: ignore[misc]
    """Stores equal vectors once, because the zero points of all channels are 8 bytes of zeros."""

    def __init__(self) -> None:
        super().__init__(1 << 16)
        self._known: dict[tuple[str, bytes], int] = {}

    def CreateNumpyVector(self, values: np.ndarray) -> int:  # noqa: N802 - flatbuffers' name
        """See flatbuffers."""
        key = (values.dtype.str, values.tobytes())
        if key not in self._known:
            self._known[key] = super().CreateNumpyVector(values)
        return self._known[key]


def compact(graph: bytes) -> bytes:
    """Write a TFLite file again, without repetitions and without names of inner tensors."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(graph))
    for buffer in model.buffers:
        if buffer.size:  # the quantizer puts large buffers behind the table of the model
            content = graph[buffer.offset : buffer.offset + buffer.size]
            buffer.data, buffer.offset, buffer.size = np.frombuffer(content, np.uint8), 0, 0
    for subgraph in model.subgraphs:
        ports = {*subgraph.inputs, *subgraph.outputs}
        for index, tensor in enumerate(subgraph.tensors):
            tensor.name = tensor.name if index in ports else None
    builder = SharingBuilder()
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the output of the quantizer: sizes, a progress bar and a warning about memory."""
    with (
        without_remarks(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
