"""Finds out by tiny runs whether OpenVINO's convolutions use the kernels that they are given.

On 64-bit ARM, OpenVINO 2026.4 prepares the kernels of transposed convolutions, and of those that it
computes by Winograd's method, in the first run and keeps them. A training would go on with
gradients of its first weights, without an error.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import openvino

CONVOLUTIONS = frozenset(
    {
        *("Convolution", "ConvolutionBackpropData"),
        *("GroupConvolution", "GroupConvolutionBackpropData"),
    }
)
CASES = (
    # operator, channels, width and height of an image and of the kernel, stride
    *(("ConvolutionBackpropData", 8, 4, 3, 1), ("ConvolutionBackpropData", 16, 4, 3, 2)),
    *(("Convolution", 8, 4, 3, 1), ("Convolution", 64, 16, 3, 1), ("Convolution", 64, 16, 5, 1)),
)
CLOSE = 1e-3


@cache
def keeps_kernels() -> bool:
    """Whether a convolution of this OpenVINO uses the kernel of an earlier run."""
    from openvino import Core

    core = Core()
    return any(keeps_kernel(core, *case) for case in CASES)


def keeps_kernel(
    core: "openvino.Core", operator: str, channels: int, size: int, kernel: int, stride: int
) -> bool:
    """Whether a convolution gives anything but twice the result for twice the kernel."""
    from openvino import Model, opset13

    shapes = (2, channels, size, size), (channels, channels, kernel, kernel)
    given = [opset13.parameter(shape, np.float32) for shape in shapes]
    strides, around, dilations = [stride] * 2, [kernel // 2] * 2, [1, 1]
    if operator == "Convolution":
        made = opset13.convolution(*given, strides, around, around, dilations)
    else:
        made = opset13.convolution_backprop_data(
            *given, strides, pads_begin=around, pads_end=around, dilations=dilations
        )
    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(Model([made], given), "CPU", settings).create_infer_request()
    draw = np.random.default_rng(0)
    x, w = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    once, twice = (request.infer([x, factor * w])[0].copy() for factor in (1, 2))
    return not np.allclose(twice, 2 * once, rtol=CLOSE, atol=CLOSE * float(np.abs(once).max()))


def has_varying_kernels(model: "openvino.Model") -> bool:
    """Whether the kernel of a convolution in `model` depends on an input."""
    varying: set[str] = set()
    for node in model.get_ordered_ops():
        sources = [one.get_source_output().get_node().friendly_name for one in node.inputs()]
        if node.get_type_name() in CONVOLUTIONS and sources[1] in varying:
            return True
        if node.get_type_name() == "Parameter" or not varying.isdisjoint(sources):
            varying.add(node.friendly_name)
    return False
