"""Gradients of convolutions as convolutions, slices and matrix products."""

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
    A transposed convolution's weight is (I, O / groups, *kernel). Returns NotImplemented for three
    dimensions.
    """
    if x.dim() not in (3, 4):
        return NotImplemented  # type: ignore[no-any-return]
    bias = grad.sum([0, *range(2, grad.dim())]) if output_mask[2] else None
    line = x.dim() == 3
    if line:
        grad, x, weight = grad.unsqueeze(2), x.unsqueeze(2), weight.unsqueeze(2)
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    window = Window(stride, padding, dilation, groups)
    if transposed:
        d_x = adjoint(grad, x, weight, window) if output_mask[0] else None
        d_w = weight_gradient(x, grad, weight, window) if output_mask[1] else None
    else:
        d_x = input_gradient(grad, x, weight, window) if output_mask[0] else None
        d_w = weight_gradient(grad, x, weight, window) if output_mask[1] else None
    if line:
        d_x = None if d_x is None else d_x.squeeze(2)
        d_w = None if d_w is None else d_w.squeeze(2)
    return d_x, d_w, bias


def input_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dX = conv(stuffed grad, flipped weight with inputs and outputs exchanged), stride 1.

    A stride s puts s - 1 zeros behind each element of `grad` first; padding then brings the
    result to the size of `x`: dilation * (kernel - 1) - padding in front, the rest behind.
    """
    if window.stride != [1, 1]:
        grad = stuff(grad, window.stride)
    pads: list[int] = []
    for axis in (1, 0):
        reach = window.dilation[axis] * (weight.shape[2 + axis] - 1)
        front = reach - window.padding[axis]
        pads += [front, x.shape[2 + axis] + reach - front - grad.shape[2 + axis]]
    symmetric = pads[0] == pads[1] >= 0 and pads[2] == pads[3] >= 0
    if not symmetric:
        grad = aten.constant_pad_nd(grad, pads)
    return aten.convolution(  # type: ignore[no-any-return]
        grad,
        exchange(weight, window.groups).flip([2, 3]),
        None,
        [1, 1],
        [pads[2], pads[0]] if symmetric else [0, 0],
        window.dilation,
        False,
        [0, 0],
        window.groups,
    )


def adjoint(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dX of a transposed convolution: the convolution of `grad` that it is the transpose of.

    dW is that convolution's too, with `grad` and `x` exchanged. Output padding of a stride and
    more, possible with dilation, makes it larger than `x`.
    """
    d_x = aten.convolution(
        grad,
        weight,
        None,
        window.stride,
        window.padding,
        window.dilation,
        False,
        [0, 0],
        window.groups,
    )
    for axis in (2, 3):
        if d_x.shape[axis] != x.shape[axis]:
            d_x = d_x.narrow(axis, 0, x.shape[axis])
    return d_x  # type: ignore[no-any-return]


def exchange(weight: Tensor, groups: int) -> Tensor:
    """(O, I / groups, kh, kw) to (I, O / groups, kh, kw), group by group."""
    if groups == 1:
        return weight.transpose(0, 1)
    outputs, inputs, *kernel = weight.shape
    parts = weight.reshape(groups, outputs // groups, inputs, *kernel).transpose(1, 2)
    return parts.reshape(groups * inputs, outputs // groups, *kernel)


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dW[:, :, i, :] = grad^T times the windows of row i, one product for each kernel row.

    Windows are laid out along the width only (kw shifted slices side by side): full im2col would
    copy the input kh times more.
    """
    outputs, inputs, rows, columns = weight.shape
    batch, _, *out = grad.shape
    places, groups = batch * out[0] * out[1], window.groups
    # Channels last, so that the windows of a row are whole rows of the right-hand matrix.
    high, wide = window.padding
    x = aten.constant_pad_nd(x, [wide, wide, high, high]).permute(0, 2, 3, 1)
    left = grad.permute(1, 0, 2, 3).reshape(groups, outputs // groups, places)
    products = []
    for row in range(rows):
        strip = cut(x, 1, row * window.dilation[0], window.stride[0], out[0])
        windows = [
            cut(strip, 2, column * window.dilation[1], window.stride[1], out[1])
            for column in range(columns)
        ]
        right = torch.stack(windows, 3).reshape(places, columns, groups, inputs)
        if groups == 1:
            product = torch.mm(left[0], right.reshape(places, columns * inputs))
        else:
            right = right.permute(2, 0, 1, 3).reshape(groups, places, columns * inputs)
            product = torch.bmm(left, right)
        products.append(product.reshape(outputs, columns, inputs))
    return torch.stack(products, 1).permute(0, 3, 1, 2)


FORMS: Forms = {aten.convolution_backward.default: convolution_backward}
