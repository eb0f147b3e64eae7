"""Gradients in the forms that XNNPACK is quick at, where they differ from other runtimes'."""

import torch
from torch import Tensor

from exporters.decompositions import convolution
from exporters.decompositions.form import Forms
from exporters.decompositions.slicing import cut

aten = torch.ops.aten


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
    """As in `exporters.decompositions.convolution`, with the weight's gradient from here."""
    found = convolution.convolution_backward(
        grad,
        x,
        weight,
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        [output_mask[0], False, output_mask[2]],
    )
    if found is NotImplemented or not output_mask[1]:
        return found
    # A transposed convolution is the gradient of one, with image and gradient exchanged.
    image, moved = (grad, x) if transposed else (x, grad)
    line = x.dim() == 3
    if line:
        image, moved, weight = image.unsqueeze(2), moved.unsqueeze(2), weight.unsqueeze(2)
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    window = convolution.Window(stride, padding, dilation, groups)
    d_w = weight_gradient(moved, image, weight, window)
    return found[0], d_w.squeeze(2) if line else d_w, found[2]


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: convolution.Window) -> Tensor:
    """dW as one matrix product a sample, added up: (rows * O, places) times (places, columns * I).

    Places are those of the padded image's rows. The windows of a row lie side by side on the right,
    `grad` as often as the kernel has rows on the left, each time as many places further down.
    """
    outputs, inputs, rows, columns = weight.shape
    if window.groups > 1:
        own = convolution.Window(window.stride, window.padding, window.dilation, 1)
        width = outputs // window.groups
        parts = []
        for group in range(window.groups):
            moved = cut(grad, 1, group * width, 1, width)
            image = cut(x, 1, group * inputs, 1, inputs)
            parts.append(weight_gradient(moved, image, weight[:width], own))
        return torch.cat(parts)
    batch, _, high, wide = grad.shape
    above, left = window.padding
    image = aten.constant_pad_nd(x, [left, left, above, above]).permute(0, 2, 3, 1)
    strip = torch.cat(
        [cut(image, 2, n * window.dilation[1], window.stride[1], wide) for n in range(columns)], 3
    )
    grads = grad.permute(0, 2, 3, 1).reshape(batch, high * wide, outputs)
    if window.stride[0] > 1:
        products = []
        for row in range(rows):
            part = cut(strip, 1, row * window.dilation[0], window.stride[0], high)
            part = part.reshape(batch, high * wide, columns * inputs)
            products.append(torch.bmm(grads.transpose(1, 2), part).sum(0))
        found = torch.stack(products)
    else:
        lines = image.shape[1]
        shifts = [row * window.dilation[0] for row in range(rows)]
        moved = [
            aten.constant_pad_nd(grads, [0, 0, shift * wide, (lines - high - shift) * wide])
            for shift in shifts
        ]
        strip = strip.reshape(batch, lines * wide, columns * inputs)
        found = torch.bmm(torch.cat(moved, 2).transpose(1, 2), strip).sum(0)
    return found.reshape(rows, outputs, columns, inputs).permute(1, 3, 0, 2)


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """dX = grad where x > threshold, 0 elsewhere: sign(relu(x - threshold)) is 1 there, else 0."""
    return grad * torch.sign(torch.relu(x - threshold if threshold else x))


FORMS: Forms = {
    aten.convolution_backward.default: convolution_backward,
    aten.threshold_backward.default: threshold_backward,
}
