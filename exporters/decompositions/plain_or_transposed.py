"""Rewrites a plain convolution as a transposed one, or the reverse, if the result is faster."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from exporters.decompositions.convolution import Window, convolution_by, convolve
from exporters.decompositions.decomposition import Decompositions
from exporters.decompositions.strided_slices import stuff

aten = torch.ops.aten

FEWEST_PIXELS = 64
"""Number of pixels below which ONNX Runtime's transposed convolution is slower than a plain one."""


def cheaper_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, output_padding: list[int] | None
) -> Tensor:
    """Choose the faster of a plain and a transposed convolution for ONNX Runtime, at stride 1.

    A plain convolution copies its input window by window into a matrix. The matrix has as many
    numbers as the input times the number of kernel elements. The convolution then multiplies once.
    A transposed convolution multiplies first and then adds up the overlapping windows of its
    output. Therefore a transposed convolution is faster if a layer has at most half as many output
    channels as input channels (measured on x86: 1.5 times as fast for 64 input and 16 output
    channels). Returns NotImplemented if the convolution is already of the faster kind.
    """
    more = output_padding or [0] * len(window.stride)
    # Checked first, because ONNX Runtime cannot run such a convolution at all.
    if output_padding is not None and any(
        o >= s for o, s in zip(output_padding, window.stride, strict=True)
    ):
        return cut_and_padded(x, weight, bias, window, output_padding)
    if any(s != 1 for s in window.stride) or any(more) or not isinstance(weight.shape[1], int):
        return NotImplemented  # type: ignore[no-any-return]
    is_transposed = output_padding is not None
    kernel = [int(size) for size in weight.shape[2:]]
    inputs, outputs = int(weight.shape[0]) // window.groups, int(weight.shape[1])
    if not is_transposed:
        inputs, outputs = outputs, inputs
    better_transposed = 2 * outputs <= inputs and math.prod(x.shape[2:]) >= FEWEST_PIXELS
    if better_transposed == is_transposed or (math.prod(kernel) == 1 and not is_transposed):
        return NotImplemented  # type: ignore[no-any-return]
    if output_padding is not None:
        return untransposed(x, weight, bias, window, output_padding)
    pads = other_padding(weight, window)
    if min(pads) < 0:
        return NotImplemented  # type: ignore[no-any-return]
    flipped = swap_channels(weight, window.groups)
    return replace(window, padding=pads).convolution(x, flipped, more, bias)


def cut_and_padded(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, output_padding: list[int]
) -> Tensor:
    """Compute a transposed convolution, and apply padding and output padding to its result.

    This is needed because ONNX Runtime accepts output padding only if it is smaller than the
    stride.
    """
    # The convolution has no padding; instead, its result is cropped below by negative pads.
    none = [0] * len(window.stride)
    whole = replace(window, padding=none).convolution(x, weight, none)
    pads = [
        n
        for p, o in zip(reversed(window.padding), reversed(output_padding), strict=True)
        for n in (-p, o - p)
    ]
    y: Tensor = aten.constant_pad_nd(whole, pads)
    return y if bias is None else y + bias.reshape([-1, *[1] * len(none)])


def untransposed(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, output_padding: list[int]
) -> Tensor:
    """Compute a transposed convolution in one or two dimensions as a plain convolution of stride 1.

    `x` is (N, A, *in), `weight` (A, B / groups, *kernel). Returns NotImplemented for three
    dimensions.
    """
    if x.dim() not in (3, 4):
        return NotImplemented  # type: ignore[no-any-return]
    if x.dim() == 3:
        image, kernels = x.unsqueeze(2), weight.unsqueeze(2)
        return untransposed(image, kernels, bias, window.of_line(), [0, *output_padding]).squeeze(2)
    stride, padding, dilation = window.stride, window.padding, window.dilation
    size = [
        (int(x.shape[2 + a]) - 1) * stride[a]
        - 2 * padding[a]
        + dilation[a] * (int(weight.shape[2 + a]) - 1)
        + output_padding[a]
        + 1
        for a in (0, 1)
    ]
    # Phases need no inserted zeros, but they do not support dilation.
    method = split_into_phases if stride != [1, 1] and dilation == [1, 1] else insert_zeros
    result = method(x, weight, window, size)
    return result if bias is None else result + bias.reshape(1, -1, 1, 1)


def insert_zeros(x: Tensor, weight: Tensor, window: Window, size: list[int]) -> Tensor:
    """Put stride - 1 zeros behind each element of `x`, then convolve with the flipped weight.

    The padding in front is dilation * (kernel - 1) - padding. The padding behind is chosen so that
    the result has the size `size`.
    """
    dilation, groups = window.dilation, window.groups
    if window.stride != [1, 1]:
        x = stuff(x, window.stride)
    front = other_padding(weight, window)
    pads: list[int] = []
    for axis in (1, 0):
        span = dilation[axis] * (int(weight.shape[2 + axis]) - 1)
        pads += [front[axis], size[axis] + span - front[axis] - int(x.shape[2 + axis])]
    return convolve(x, swap_channels(weight, groups), pads, dilation=dilation, groups=groups)


def split_into_phases(x: Tensor, weight: Tensor, window: Window, size: list[int]) -> Tensor:
    """Compute each phase of the stride (position modulo stride) separately, without inserted zeros.

    In one dimension with stride s and padding p, write j + p as s * q + r. Then y[j] is the sum
    over t of the products x[q - t] * w[s * t + r]. So each of the s phases r is a full convolution
    with every s-th weight. One convolution computes all phases as its output channels. Then these
    channels are interleaved.
    """
    stride, padding, groups = window.stride, window.padding, window.groups
    outer, inner, *kernel = weight.shape
    taps = [-(-int(kernel[axis]) // stride[axis]) for axis in (0, 1)]
    # Pad the kernel to a multiple of the stride, so that all phases have equally many taps.
    more = [taps[axis] * stride[axis] - int(kernel[axis]) for axis in (0, 1)]
    phases = aten.constant_pad_nd(weight, [0, more[1], 0, more[0]]).reshape(
        groups, outer // groups, inner, taps[0], stride[0], taps[1], stride[1]
    )
    phases = phases.permute(0, 2, 4, 6, 1, 3, 5).flip([5, 6]).reshape(-1, outer // groups, *taps)
    edges = [taps[1] - 1, taps[1] - 1, taps[0] - 1, taps[0] - 1]
    result = convolve(x, phases, edges, groups=groups)
    batch, _, rows, columns = result.shape
    channels = groups * inner
    result = result.reshape(batch, channels, *stride, rows, columns).permute(0, 1, 4, 2, 5, 3)
    result = result.reshape(batch, channels, rows * stride[0], columns * stride[1])
    crop: list[int] = []
    for axis in (1, 0):
        crop += [-padding[axis], size[axis] + padding[axis] - int(result.shape[2 + axis])]
    return aten.constant_pad_nd(result, crop) if any(crop) else result


def other_padding(weight: Tensor, window: Window) -> list[int]:
    """The padding dilation * (kernel - 1) - padding.

    With this padding, a plain convolution replaces a transposed convolution, or the reverse.
    """
    sizes = zip(window.dilation, weight.shape[2:], window.padding, strict=True)
    return [d * (int(k) - 1) - p for d, k, p in sizes]


def swap_channels(weight: Tensor, groups: int) -> Tensor:
    """Swap input and output channels of a weight in each group, and flip its kernel.

    The shape (A, B / groups, *kernel) becomes (B, A / groups, *kernel).
    """
    first, second, *kernel = weight.shape
    if groups == 1:
        swapped = weight.transpose(0, 1)
    else:
        parts = weight.reshape(groups, first // groups, second, *kernel).transpose(1, 2)
        swapped = parts.reshape(groups * second, first // groups, *kernel)
    return swapped.flip(list(range(2, weight.dim())))


ONNX_RUNTIME: Decompositions = {aten.convolution.default: convolution_by(cheaper_convolution)}
"""The faster convolutions for ONNX Runtime."""
