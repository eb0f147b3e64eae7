"""Gradients of convolutions as convolutions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exporters.decompositions.form import Forms
from exporters.decompositions.slicing import cut, stuff

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """How a 2-D convolution's kernel moves; each list holds height and width."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `x`, `weight` and bias for an output gradient `grad` (N, O, *out).

    `x` is (N, I, *in) with one or two spatial dimensions, `weight` (O, I / groups, *kernel).
    Returns NotImplemented for transposed and three-dimensional convolutions.
    """
    if transposed or x.dim() not in (3, 4):
        return NotImplemented  # type: ignore[no-any-return]
    bias = grad.sum([0, *range(2, grad.dim())]) if output_mask[2] else None
    line = x.dim() == 3
    if line:
        grad, x, weight = grad.unsqueeze(2), x.unsqueeze(2), weight.unsqueeze(2)
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    window = Window(stride, padding, dilation, groups)
    d_x = input_gradient(grad, x, weight, window) if output_mask[0] else None
    d_w = weight_gradient(grad, x, weight, window) if output_mask[1] else None
    if line:
        d_x = None if d_x is None else d_x.squeeze(2)
        d_w = None if d_w is None else d_w.squeeze(2)
    return d_x, d_w, bias


def input_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """The gradient of `x`: full convolutions of `grad` with the flipped weight."""
    if window.stride == [1, 1]:
        return unstrided_input_gradient(grad, x, weight, window)
    if window.dilation == [1, 1]:
        return phased_input_gradient(grad, x, weight, window)
    return unstrided_input_gradient(stuff(grad, window.stride), x, weight, window)


def unstrided_input_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dX = conv(grad, flipped weight with inputs and outputs exchanged).

    Padding brings the result to the size of `x`: dilation * (kernel - 1) - padding in front, the
    rest behind. A strided convolution's `grad` has its zeros in place already.
    """
    pads: list[int] = []
    for axis in (1, 0):
        reach = window.dilation[axis] * (weight.shape[2 + axis] - 1)
        front = reach - window.padding[axis]
        pads += [front, x.shape[2 + axis] + reach - front - grad.shape[2 + axis]]
    return convolve(
        grad,
        exchange(weight, window.groups).flip([2, 3]),
        pads,
        dilation=window.dilation,
        groups=window.groups,
    )


def phased_input_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dX of a convolution with stride s, phase by phase, for it needs no zeros between elements.

    In one dimension, with padding p and place j + p = s * q + r: dX[j] = sum over t of
    grad[q - t] * W[s * t + r]. Each of the s phases r is a full convolution of `grad` with every
    s-th weight; all phases are the channels of one convolution, which a pixel shuffle interleaves.
    """
    groups = window.groups
    outputs, inputs, *kernel = weight.shape
    strides = window.stride
    taps = [-(-kernel[axis] // strides[axis]) for axis in (0, 1)]
    extra = [taps[axis] * strides[axis] - kernel[axis] for axis in (0, 1)]
    phases = aten.constant_pad_nd(weight, [0, extra[1], 0, extra[0]]).reshape(
        groups, outputs // groups, inputs, taps[0], strides[0], taps[1], strides[1]
    )
    phases = phases.permute(0, 2, 4, 6, 1, 3, 5).flip([5, 6])
    phases = phases.reshape(-1, outputs // groups, *taps)
    reach = [taps[1] - 1] * 2 + [taps[0] - 1] * 2
    found = convolve(grad, phases, reach, groups=groups)
    batch, _, rows, columns = found.shape
    found = found.reshape(batch, groups * inputs, *strides, rows, columns)
    found = found.permute(0, 1, 4, 2, 5, 3)
    found = found.reshape(batch, groups * inputs, rows * strides[0], columns * strides[1])
    crop: list[int] = []
    for axis in (1, 0):
        front = window.padding[axis]
        crop += [-front, x.shape[2 + axis] + front - found.shape[2 + axis]]
    return aten.constant_pad_nd(found, crop) if any(crop) else found  # type: ignore[no-any-return]


def convolve(
    x: Tensor,
    weight: Tensor,
    pads: list[int],
    stride: Sequence[int] = (1, 1),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """A 2-D convolution with `pads` [left, right, top, bottom]; negative ones cut off."""
    symmetric = pads[0] == pads[1] >= 0 and pads[2] == pads[3] >= 0
    if not symmetric:
        x = aten.constant_pad_nd(x, pads)
    padding = [pads[2], pads[0]] if symmetric else [0, 0]
    return aten.convolution(  # type: ignore[no-any-return]
        x, weight, None, list(stride), padding, list(dilation), False, [0, 0], groups
    )


def exchange(weight: Tensor, groups: int) -> Tensor:
    """(O, I / groups, kh, kw) to (I, O / groups, kh, kw), group by group."""
    if groups == 1:
        return weight.transpose(0, 1)
    outputs, inputs, *kernel = weight.shape
    parts = weight.reshape(groups, outputs // groups, inputs, *kernel).transpose(1, 2)
    return parts.reshape(groups * inputs, outputs // groups, *kernel)


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dW as one convolution whose kernel is `grad` and whose image is `x` with channels last.

    dW[o, i, a, b] = sum over n, u, v of grad[n, o, u, v] * x[n, i, s u + d a - p, s v + d b - p].
    Samples are the channels that are summed over; a row of the image holds the I channels of each
    of its places, so that a step of one place is a dilation of I and the result's row (b, i) has I
    neighbours to compute at once. The stride s of the layer is the kernel's dilation here, and its
    dilation d the stride.
    """
    outputs, inputs, rows, columns = weight.shape
    batch, _, *image = x.shape
    groups = window.groups
    if groups == 1:
        parts = x.permute(0, 2, 3, 1)
    else:
        parts = x.reshape(batch, groups, inputs, *image).permute(1, 0, 3, 4, 2)
    parts = parts.reshape(1, groups * batch, image[0], image[1] * inputs)
    pads: list[int] = []
    for axis in (1, 0):
        front = window.padding[axis]
        span = window.dilation[axis] * (weight.shape[2 + axis] - 1)
        covered = window.stride[axis] * (grad.shape[2 + axis] - 1) + span + 1
        pads += [front, covered - front - image[axis]]
    found = convolve(
        parts,
        grad.transpose(0, 1),
        [pads[0] * inputs, pads[1] * inputs, *pads[2:]],
        stride=[window.dilation[0], 1],
        dilation=[window.stride[0], window.stride[1] * inputs],
        groups=groups,
    )
    found = found.reshape(outputs, rows, -1, inputs)
    if window.dilation[1] > 1:
        found = cut(found, 2, 0, window.dilation[1], columns)
    return found.permute(0, 3, 1, 2)


FORMS: Forms = {aten.convolution_backward.default: convolution_backward}
