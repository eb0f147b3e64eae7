"""Convolutions as transposed ones and the other way round: a runtime is quicker at one of them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from exporters.decompositions.convolution import Window, convolve
from exporters.decompositions.decomposition import Decompositions
from exporters.decompositions.strided_slices import stuff

aten = torch.ops.aten

FEWEST_PLACES = 64
"""Places of an image below which ONNX Runtime's transposed convolution is the slower one."""


def cheaper_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    is_transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """The form of a convolution with stride 1 that costs ONNX Runtime less.

    A convolution lays its input out window by window, kernel times as large, and multiplies once;
    a transposed one multiplies first and adds the overlapping windows of its output up. So a layer
    with half as many outputs as inputs or fewer is quicker transposed (measured, x86: 1.5 times at
    64 to 16 channels), others are not. Returns NotImplemented where the form is the right one.
    """
    if is_transposed and any(o >= s for o, s in zip(output_padding, stride, strict=True)):
        return cut_and_padded(
            x, weight, bias, Window(stride, padding, dilation, groups), output_padding
        )
    if any(s != 1 for s in stride) or any(output_padding) or not isinstance(weight.shape[1], int):
        return NotImplemented  # type: ignore[no-any-return]
    kernel = [int(size) for size in weight.shape[2:]]
    inputs, outputs = int(weight.shape[0]) // groups, int(weight.shape[1])
    if not is_transposed:
        inputs, outputs = outputs, inputs
    crowded = 2 * outputs <= inputs and math.prod(x.shape[2:]) >= FEWEST_PLACES
    if crowded == is_transposed or (math.prod(kernel) == 1 and not is_transposed):
        return NotImplemented  # type: ignore[no-any-return]
    if is_transposed:
        return untransposed(
            x, weight, bias, stride, padding, dilation, is_transposed, output_padding, groups
        )
    around = reach(weight, padding, dilation)
    if min(around) < 0:
        return NotImplemented  # type: ignore[no-any-return]
    turned = exchange(weight, groups)
    return aten.convolution(  # type: ignore[no-any-return]
        x, turned, bias, stride, around, dilation, True, output_padding, groups
    )


def cut_and_padded(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Window,
    output_padding: list[int],
) -> Tensor:
    """The whole transposed convolution, cut by the window's padding and padded by `output_padding`.

    ONNX Runtime refuses output padding that reaches the stride.
    """
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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    is_transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """A transposed convolution, with one or two spatial dimensions, as plain ones of stride 1.

    `x` (N, A, *in), `weight` (A, B / groups, *kernel); NotImplemented for other convolutions.
    """
    if not is_transposed or x.dim() not in (3, 4):
        return NotImplemented  # type: ignore[no-any-return]
    if x.dim() == 3:
        sizes = ([1, *stride], [0, *padding], [1, *dilation], True, [0, *output_padding], groups)
        return untransposed(x.unsqueeze(2), weight.unsqueeze(2), bias, *sizes).squeeze(2)
    kernel = [int(size) for size in weight.shape[2:]]
    size = [
        (int(x.shape[2 + a]) - 1) * stride[a]
        - 2 * padding[a]
        + dilation[a] * (kernel[a] - 1)
        + output_padding[a]
        + 1
        for a in (0, 1)
    ]
    if stride != [1, 1] and dilation == [1, 1]:
        found = by_phases(x, weight, stride, padding, size, groups)
    else:
        found = by_zeros(x, weight, stride, padding, dilation, size, groups)
    return found if bias is None else found + bias.reshape(1, -1, 1, 1)


def by_zeros(
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    size: list[int],
    groups: int,
) -> Tensor:
    """A convolution with the turned weight of `x` with stride - 1 zeros behind each element.

    Padding brings the result to `size`: dilation * (kernel - 1) - padding in front, the rest
    behind.
    """
    if stride != [1, 1]:
        x = stuff(x, stride)
    front = reach(weight, padding, dilation)
    pads: list[int] = []
    for axis in (1, 0):
        span = dilation[axis] * (int(weight.shape[2 + axis]) - 1)
        pads += [front[axis], size[axis] + span - front[axis] - int(x.shape[2 + axis])]
    return convolve(x, exchange(weight, groups), pads, dilation=dilation, groups=groups)


def by_phases(
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    size: list[int],
    groups: int,
) -> Tensor:
    """Phase by phase, which needs no zeros between elements.

    In one dimension, with padding p and place j + p = s * q + r: y[j] = sum over t of
    x[q - t] * w[s * t + r]. Each of the s phases r is a full convolution with every s-th weight;
    all phases are the channels of one convolution, and are interleaved afterwards.
    """
    outer, inner, *kernel = weight.shape
    taps = [-(-int(kernel[axis]) // stride[axis]) for axis in (0, 1)]
    more = [taps[axis] * stride[axis] - int(kernel[axis]) for axis in (0, 1)]
    phases = aten.constant_pad_nd(weight, [0, more[1], 0, more[0]]).reshape(
        groups, outer // groups, inner, taps[0], stride[0], taps[1], stride[1]
    )
    phases = phases.permute(0, 2, 4, 6, 1, 3, 5).flip([5, 6]).reshape(-1, outer // groups, *taps)
    edges = [taps[1] - 1, taps[1] - 1, taps[0] - 1, taps[0] - 1]
    found = convolve(x, phases, edges, groups=groups)
    batch, _, rows, columns = found.shape
    channels = groups * inner
    found = found.reshape(batch, channels, *stride, rows, columns).permute(0, 1, 4, 2, 5, 3)
    found = found.reshape(batch, channels, rows * stride[0], columns * stride[1])
    crop: list[int] = []
    for axis in (1, 0):
        crop += [-padding[axis], size[axis] + padding[axis] - int(found.shape[2 + axis])]
    return aten.constant_pad_nd(found, crop) if any(crop) else found


def reach(weight: Tensor, padding: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Padding of the other form: dilation * (kernel - 1) - padding."""
    kernel = [int(size) for size in weight.shape[2:]]
    return [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]


def exchange(weight: Tensor, groups: int) -> Tensor:
    """A weight with inputs and outputs exchanged, group by group, and its kernel turned round.

    (A, B / groups, *kernel) to (B, A / groups, *kernel).
    """
    first, second, *kernel = weight.shape
    if groups == 1:
        swapped = weight.transpose(0, 1)
    else:
        parts = weight.reshape(groups, first // groups, second, *kernel).transpose(1, 2)
        swapped = parts.reshape(groups * second, first // groups, *kernel)
    return swapped.flip(list(range(2, weight.dim())))


ONNX_RUNTIME: Decompositions = {aten.convolution.default: cheaper_convolution}
"""What ONNX Runtime is quickest at."""

UNTRANSPOSED: Decompositions = {aten.convolution.default: untransposed}
"""For runtimes without strided transposed convolutions."""
