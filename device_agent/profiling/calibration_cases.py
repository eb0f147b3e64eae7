"""The cases of a calibration: which graphs run with which input shapes.

The graphs are files in `calibration_graphs`. Cases are small, so that most boards finish all of
them in a minute: a case has at most about 150 million multiply-accumulates and 8 MB per tensor.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from device_agent.formats.graph_forms import BLOCKS

Shape = tuple[int, ...]
Case = tuple[str, Mapping[str, Shape]]
"""Name of a graph, and the shape of each of its inputs."""

GRAPHS = Path(__file__).with_name("calibration_graphs")

LARGEST_BLOCK = max(BLOCKS)
MAX_MACS = 24e6
"""Multiply-accumulates of a convolution case. A case with a single image may have more."""

CONVOLUTIONS = (
    # input channels, output channels, kernel, image. Layers with more channels get smaller images.
    *((3, 16, 3, 32), (16, 16, 3, 32), (16, 64, 3, 32), (64, 16, 3, 32), (64, 64, 3, 32)),
    *((8, 8, 3, 16), (16, 32, 3, 16), (32, 32, 3, 16), (32, 32, 3, 8), (64, 64, 3, 8)),
    *((128, 128, 3, 16), (64, 64, 3, 16), (128, 128, 3, 8), (256, 256, 3, 8), (256, 256, 3, 4)),
    *((512, 512, 3, 4), (128, 512, 3, 4), (512, 128, 3, 4), (8, 8, 3, 4), (64, 64, 3, 4)),
    *((16, 32, 1, 16), (32, 64, 1, 8), (64, 64, 1, 32), (64, 256, 1, 8), (256, 64, 1, 8)),
    *((512, 512, 1, 4), (1, 16, 5, 28), (16, 32, 5, 14), (32, 64, 5, 14), (8, 16, 5, 8)),
)
LINE_CONVOLUTIONS = (
    # input channels, output channels, kernel, image. The factors of a convolution have kernels of
    # one row or one column.
    *((16, 64, 3, 32), (64, 16, 3, 32), (32, 128, 3, 16), (128, 32, 3, 16)),
    *((64, 256, 3, 8), (256, 64, 3, 8), (128, 512, 3, 4), (512, 128, 3, 4)),
)
WEIGHT_GRADIENTS = (
    # output channels, images, size of the gradient, dilation. The size is width and height. The
    # dilation is the number of the layer's input channels.
    *((16, 32, 32, 8), (16, 32, 16, 32), (64, 32, 8, 32), (64, 32, 8, 128), (128, 32, 4, 128)),
    *((16, 16, 32, 32), (64, 16, 16, 32), (512, 32, 4, 32), (32, 16, 16, 128), (8, 32, 8, 8)),
    *((64, 4, 32, 32), (256, 32, 4, 128), (64, 32, 16, 8), (32, 32, 4, 32)),
)
PRODUCTS = (
    # number of matrices, rows, columns, length of the sum
    *((1, 32, 10, 128), (1, 32, 128, 784), (1, 32, 2048, 256), (1, 256, 256, 256)),
    *((1, 32, 256, 2048), (1, 512, 512, 64), (1, 64, 64, 1024), (1, 2048, 64, 64)),
    *((1, 8, 8, 8), (1, 32, 64, 64), (1, 1024, 16, 64), (1, 16, 1024, 1024)),
    *((64, 16, 16, 16), (128, 32, 32, 16), (32, 64, 64, 32), (8, 128, 32, 128)),
    # gradients of the weights of dense layers, for a batch of 32
    *((1, 1024, 1024, 32), (1, 2048, 1024, 32), (1, 256, 784, 32), (1, 64, 1024, 32)),
    # weights of a large layer, which do not fit into any cache
    (1, 8, 1024, 2048),
    (1, 32, 1024, 2048),
)
POINTWISE = (1, 64, 1024, 2**14, 2**16, 2**18, 2**19, 2**21)
"""Numbers of elements of the tensors."""
IMAGES = (
    # batch, channels, height, width
    *((1, 1, 2, 2), (2, 8, 4, 4), (8, 16, 8, 8), (32, 64, 4, 4), (32, 64, 8, 8), (32, 16, 16, 16)),
    *((32, 16, 32, 32), (32, 64, 16, 16), (32, 256, 4, 4), (32, 64, 32, 32)),
)


CHANNELS = 64
"""Channels of the blocked convolutions that have one filter for each channel."""


def images_for(macs: float) -> int:
    """Number of images in a case, if one image takes `macs` multiply-accumulates."""
    return max(1, min(8, int(MAX_MACS / macs)))


def convolutions() -> Iterator[Case]:
    """Yield forward passes of convolutions, and gradients of their inputs."""
    for inputs, outputs, kernel, size in CONVOLUTIONS:
        images = images_for(inputs * outputs * kernel**2 * size**2)
        wide = size + kernel - 1
        weight = (outputs, inputs, kernel, kernel)
        yield "convolution", {"x": (images, inputs, wide, wide), "w": weight}
    for inputs, outputs, kernel, size in LINE_CONVOLUTIONS:
        images = images_for(inputs * outputs * kernel * size**2)
        flat = {"x": (images, inputs, size, size + kernel - 1), "w": (outputs, inputs, 1, kernel)}
        yield "convolution", flat
        upright = {
            "x": (images, inputs, size + kernel - 1, size),
            "w": (outputs, inputs, kernel, 1),
        }
        yield "convolution", upright
        back = {"x": (images, outputs, size, size), "w": (outputs, inputs, 1, kernel)}
        yield "transposed", back
    for inputs, outputs, kernel, size in CONVOLUTIONS[::3]:
        images = images_for(inputs * outputs * kernel**2 * size**2)
        back = {"x": (images, outputs, size, size), "w": (outputs, inputs, kernel, kernel)}
        yield "transposed", back
        if kernel > 1 and size > 4:
            yield "transposed_strided", back
            wide = 2 * size + kernel - 2
            weight = (outputs, inputs, kernel, kernel)
            yield "convolution_strided", {"x": (images, inputs, wide, wide), "w": weight}


def blocked_convolutions() -> Iterator[Case]:
    """Yield convolutions in the runtime's blocked layout. Their channels fill whole blocks."""
    for inputs, outputs, kernel, size in CONVOLUTIONS:
        if inputs % LARGEST_BLOCK == outputs % LARGEST_BLOCK == 0:
            images = images_for(inputs * outputs * kernel**2 * size**2)
            wide = size + kernel - 1
            weight = (outputs, inputs, kernel, kernel)
            yield "blocked", {"x": (images, inputs, wide, wide), "w": weight}
    for inputs, outputs, kernel, size in LINE_CONVOLUTIONS:
        images = images_for(inputs * outputs * kernel * size**2)
        flat = {"x": (images, inputs, size, size + kernel - 1), "w": (outputs, inputs, 1, kernel)}
        yield "blocked", flat
    for images, size in ((1, 4), (8, 8), (8, 16), (32, 8), (32, 32)):
        whole = (images, CHANNELS, size, size)
        yield "scaled", {"x": whole, "w": (CHANNELS, 1, 1, 1), "s": whole}
        around = (images, CHANNELS, size + 2, size + 2)
        yield "blocked_depthwise", {"x": around, "w": (CHANNELS, 1, 3, 3)}


def weight_gradients() -> Iterator[Case]:
    """Yield gradients of convolution weights.

    Such a gradient is itself a convolution, whose kernel is the gradient of the output.

    The graphs contain this convolution in the form that the exporters write.
    """
    for outputs, images, size, dilation in WEIGHT_GRADIENTS:
        x = (1, images, size + 2, (size + 2) * dilation)
        weight = (outputs, images, size, size)
        yield f"convolution_dilated_{dilation}", {"x": x, "w": weight}


def products() -> Iterator[Case]:
    """Yield matrix products. Products of two single matrices also run with one side transposed."""
    for matrices, rows, columns, length in PRODUCTS:
        shapes = {"x": (matrices, rows, length), "w": (matrices, length, columns)}
        yield "product", shapes
        if matrices == 1:
            yield "gemm_rows", {"x": (rows, length), "w": (columns, length)}
            yield "gradient", {"x": (length, rows), "w": (length, columns), "c": (rows, columns)}


def passes() -> Iterator[Case]:
    """Yield operations whose time depends on memory bandwidth instead of arithmetic."""
    for numbers in POINTWISE:
        yield "pointwise", dict.fromkeys("xwuv", (numbers,))
    for shape in IMAGES:
        yield "images", {"x": shape, "w": shape, "p": (1, shape[1], 1, 1)}


def all_cases(blocked: bool = False) -> Iterator[Case]:
    """Yield all cases in a fixed order. `blocked` adds cases of blocked convolutions."""
    yield from passes()
    yield from convolutions()
    if blocked:
        yield from blocked_convolutions()
    yield from weight_gradients()
    yield from products()
