"""Stores the weights of an inference graph as float16 or int8."""

from dataclasses import replace
from typing import Literal

import numpy as np
import onnx

from exporters.graph_figures import figures_of
from exporters.memory.opening import with_opening
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.source_lines import first_line
from exporters.quantization import onnx_precision
from exporters.runtime_graph import Graph
from profiles.errors import EdgeTailorError, ExportError

Precision = Literal["float32", "float16", "int8"]


def converted(
    graph: Graph, precision: Precision, signature: str, name: str, samples: np.ndarray | None = None
) -> Graph:
    """Return `graph` with weights of `precision`.

    With float16 weights, a graph computes in float32. int8 quantizes the weights of each channel,
    and the activations by their ranges on `samples`. Input and output stay float32. The figures of
    the result are for a run on one sample. They include the memory for opening the file.

    Args:
        graph: An inference graph with constant weights.
        precision: The precision of the weights.
        signature: The name of its signature.
        name: The name of its input.
        samples: Samples (n, ...) to calibrate int8; not needed otherwise.

    Raises:
        ExportError: The runtime's quantizer is not installed, or fails for this graph.
    """
    if precision == "float32":
        return with_figures(graph, graph, precision)
    try:
        data = quantized(graph, signature, name, samples if precision == "int8" else None)
    except EdgeTailorError:
        raise
    except Exception as error:  # the quantizers raise errors of many types
        raise_if_interrupted(error)
        raise ExportError(
            "The graph cannot be stored as {precision}: {reason}. Deploy it as float32.",
            code="export.cannot-quantize",
            precision=precision,
            reason=first_line(error),
        ) from error
    return with_figures(graph, replace(graph, data=data, size=len(data)), precision)


def with_figures(float32: Graph, graph: Graph, precision: Precision) -> Graph:
    """Return `graph` with its figures for one sample.

    A run of `graph` takes at most the memory of a run of `float32`, which is the graph before
    quantization.
    """
    figures = figures_of(float32, 1)
    run = figures.footprint
    if run is not None:
        if float32.runtime == "onnx":  # counts constants once
            held = sum(
                len(t.raw_data) for t in onnx.load_from_string(float32.data).graph.initializer
            )
            run = replace(run, planned=run.planned - held, process=run.process - held)
        largest = 0
        if (graph.runtime, precision) == ("litert", "float16"):
            from exporters.quantization.tflite_precision import largest_constant

            largest = largest_constant(graph.data)
        run = with_opening(run, graph.runtime, precision, graph.size, largest)
    return replace(graph, figures=replace(figures, footprint=run))


def quantized(graph: Graph, signature: str, name: str, samples: np.ndarray | None) -> bytes:
    """The file of `graph` as int8, calibrated on `samples`. Without samples, as float16."""
    if graph.runtime == "onnx":
        if samples is None:
            return onnx_precision.with_float16_weights(graph.data)
        return onnx_precision.with_int8(graph.data, name, samples)
    try:
        from exporters.quantization import tflite_precision
    except ImportError as error:
        raise ExportError(
            "The quantizer of TFLite graphs is not installed: {reason}. Install it with `pip "
            "install 'edgetailor[quantizer]'`, or deploy with --format onnx.",
            code="export.quantizer-not-installed",
            reason=str(error),
        ) from error
    if samples is None:
        return tflite_precision.with_float16_weights(graph.data)
    return tflite_precision.with_int8(graph.data, signature, name, samples)
