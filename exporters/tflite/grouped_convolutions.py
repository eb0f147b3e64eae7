"""Writes grouped convolutions with a number of operators that does not grow with the groups."""

import torch
from torch import Tensor

from exporters.decompositions.convolution import Window, convolution_by
from exporters.decompositions.decomposition import Decompositions
from exporters.decompositions.plain_or_transposed import untransposed
from exporters.decompositions.strided_slices import cut

aten = torch.ops.aten


def convolution_for_products(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, output_padding: list[int] | None
) -> Tensor:
    """Rewrite transposed and grouped convolutions. NotImplemented for kinds that TFLite has.

    TFLite has convolutions with one group, and convolutions with one input channel per group.
    """
    if output_padding is not None:
        return untransposed(x, weight, bias, window, output_padding)
    if window.groups == 1 or weight.shape[1] == 1 or x.dim() not in (3, 4):
        return NotImplemented  # type: ignore[no-any-return]
    if x.dim() == 3:
        image, kernels = x.unsqueeze(2), weight.unsqueeze(2)
        y = grouped_convolution(image, kernels, window.of_line()).squeeze(2)
    else:
        y = grouped_convolution(x, weight, window)
    return y if bias is None else y + bias.reshape(-1, *[1] * (x.dim() - 2))


CONVOLUTIONS: Decompositions = {aten.convolution.default: convolution_by(convolution_for_products)}
"""For a runtime without transposed convolutions and without groups of several channels."""


def grouped_convolution(x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """Compute a convolution by one batched matrix product for each row of its kernel.

    The batch axis is the group: (positions, columns * I / groups) times (columns * I / groups,
    O / groups).
    """
    outputs, inputs, rows, columns = weight.shape
    samples, groups = x.shape[0], window.groups
    above, left = window.padding
    image = aten.constant_pad_nd(x, [left, left, above, above])
    high, wide = (
        (int(image.shape[2 + axis]) - window.dilation[axis] * (weight.shape[2 + axis] - 1) - 1)
        // window.stride[axis]
        + 1
        for axis in (0, 1)
    )
    image = image.reshape(samples, groups, inputs, *image.shape[2:]).permute(1, 0, 3, 4, 2)
    strip = torch.cat(
        [cut(image, 3, n * window.dilation[1], window.stride[1], wide) for n in range(columns)], 4
    )
    factors = weight.reshape(groups, outputs // groups, inputs, rows, columns)
    factors = factors.permute(0, 3, 4, 2, 1).reshape(groups, rows, columns * inputs, -1)
    total: Tensor | None = None
    for row in range(rows):
        lines = cut(strip, 2, row * window.dilation[0], window.stride[0], high)
        lines = lines.reshape(groups, samples * high * wide, columns * inputs)
        part = torch.bmm(lines, factors[:, row])
        total = part if total is None else total + part
    assert total is not None
    y = total.reshape(groups, samples, high, wide, outputs // groups).permute(1, 0, 4, 2, 3)
    return y.reshape(samples, outputs, high, wide)


def depthwise_weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """dW of a convolution with one input channel per group: a sum of products per kernel element.

    With one matrix product per channel, the graph would grow with the number of channels.
    """
    outputs, _, rows, columns = weight.shape
    samples, channels = x.shape[:2]
    high, wide = grad.shape[2:]
    above, left = window.padding
    image = aten.constant_pad_nd(x, [left, left, above, above]).permute(0, 2, 3, 1)
    grads = grad.permute(0, 2, 3, 1)
    if outputs > channels:
        image = image.unsqueeze(4)
        grads = grads.reshape(samples, high, wide, channels, outputs // channels)
    lines = [cut(image, 1, n * window.dilation[0], window.stride[0], high) for n in range(rows)]
    products = [
        (cut(line, 2, n * window.dilation[1], window.stride[1], wide) * grads).sum([0, 1, 2])
        for line in lines
        for n in range(columns)
    ]
    return torch.stack(products).reshape(rows, columns, outputs, 1).permute(2, 3, 0, 1)
