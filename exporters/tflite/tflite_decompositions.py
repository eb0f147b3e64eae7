"""Decompositions for the TFLite writer alone.

Forms that XNNPACK runs fast, and replacements for what TFLite has no operator for.

They come ahead of the table that all writers share.
"""

import math
import sys
from collections.abc import Sequence
from functools import partial, reduce
from typing import cast

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from exporters.decompositions import convolution
from exporters.decompositions.average_pooling import corrected, windows
from exporters.decompositions.convolution_choice import UNTRANSPOSED
from exporters.decompositions.decomposition import Decompositions
from exporters.decompositions.strided_slices import cut, stuff
from exporters.decompositions.traced_constants import constant
from exporters.tflite import composed_operators

aten = torch.ops.aten


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: convolution.Window) -> Tensor:
    """dW as one matrix product a sample, added up: (rows * O, places) times (places, columns * I).

    Places are those of the padded image's rows. The windows of a row lie side by side on the right,
    `grad` as often as the kernel has rows on the left, each time as many places further down.
    """
    outputs, inputs, rows, columns = weight.shape
    if window.groups > 1:
        own = convolution.Window(window.stride, window.padding, window.dilation, 1)
        width = outputs // window.groups
        own_parts = []
        for group in range(window.groups):
            part_of_grad = cut(grad, 1, group * width, 1, width)
            image = cut(x, 1, group * inputs, 1, inputs)
            own_parts.append(weight_gradient(part_of_grad, image, weight[:width], own))
        return torch.cat(own_parts)
    batch, _, high, wide = grad.shape
    above, left = window.padding
    image = aten.constant_pad_nd(x, [left, left, above, above]).permute(0, 2, 3, 1)
    strip = torch.cat(
        [cut(image, 2, n * window.dilation[1], window.stride[1], wide) for n in range(columns)], 3
    )
    # In this order before it is repeated: XNNPACK turns the left factor of a product by a copy.
    grads = grad.reshape(batch, outputs, high * wide)
    grads = grads.clone(memory_format=torch.contiguous_format)
    if window.stride[0] > 1:
        products = []
        for row in range(rows):
            part = cut(strip, 1, row * window.dilation[0], window.stride[0], high)
            part = part.reshape(batch, high * wide, columns * inputs)
            products.append(torch.bmm(grads, part).sum(0))
        found = torch.stack(products)
    else:
        lines = image.shape[1]
        shifts = [row * window.dilation[0] for row in range(rows)]
        moved = [
            aten.constant_pad_nd(grads, [shift * wide, (lines - high - shift) * wide])
            for shift in shifts
        ]
        strip = strip.reshape(batch, lines * wide, columns * inputs)
        found = torch.bmm(torch.cat(moved, 1), strip).sum(0)
    return found.reshape(rows, outputs, columns, inputs).permute(1, 3, 0, 2)


def average_pool(
    x: Tensor,
    kernel: list[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    axes: int,
) -> Tensor:
    """The mean of each window: shifted slices added up, over the elements that count."""
    along = windows(x, kernel, list(stride), list(padding), ceil_mode, axes)
    total: Tensor = aten.constant_pad_nd(
        x, [n for w in reversed(along) for n in (w.front, w.behind)]
    )
    for axis, w in enumerate(along, x.dim() - axes):
        total = reduce(torch.add, [cut(total, axis, n, w.step, w.count) for n in range(w.kernel)])
    means = total * (1 / math.prod(w.kernel for w in along))
    return corrected(means, along, count_include_pad, divisor_override)


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """dX = grad where z = relu(x - threshold) > 0, 0 elsewhere: min(z, 1) rounded up.

    XNNPACK has these, but neither comparisons nor signs: what it does not take splits its graph,
    and everything that is ready runs, and is kept, before the split.
    """
    above = torch.relu(x - threshold if threshold else x)
    return grad * torch.ceil(aten.hardtanh(above, -1.0, 1.0))


def log_softmax(x: Tensor, axis: int, half_to_float: bool) -> Tensor:
    """z - log(sum(exp(z))) with z = x - max(x)."""
    moved = x - x.amax(axis, keepdim=True)
    return moved - torch.log(torch.exp(moved).sum(axis, keepdim=True))


def log1p(x: Tensor) -> Tensor:
    """log(1 + x)."""
    return torch.log(1 + x)


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1."""
    return torch.exp(x) - 1


def split(x: Tensor, sizes: Sequence[int], axis: int = 0) -> list[Tensor]:
    """Parts of `sizes`, one after the other."""
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [cut(x, axis, start, 1, size) for start, size in zip(starts, sizes, strict=True)]


def slice_scatter(
    x: Tensor,
    part: Tensor,
    axis: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """`x` with `part` in the place of a slice: what is ahead of it, the part, what is behind.

    A part of every `step`-th element gets zeros between them, which `x` replaces.
    """
    if step == 1 and not start and (end is None or end >= sys.maxsize):
        return part
    if not isinstance(x.shape[axis], int):
        return NotImplemented  # type: ignore[no-any-return]
    first, last, _ = slice(start, end).indices(int(x.shape[axis]))
    if step != 1:
        axis %= x.dim()
        taken = range(first, last, step)
        spaced = stuff(part.movedim(axis, -1), [step])
        spaced = aten.constant_pad_nd(spaced, [first, x.shape[axis] - first - spaced.shape[-1]])
        inside = constant([place in taken for place in range(x.shape[axis])])
        return torch.where(inside, spaced, x.movedim(axis, -1)).movedim(-1, axis)
    ahead, behind = first, int(x.shape[axis]) - last
    pieces = [cut(x, axis, 0, 1, ahead)] if ahead else []
    pieces.append(part)
    pieces += [cut(x, axis, last, 1, behind)] if behind else []
    return torch.cat(pieces, axis)


def var(
    x: Tensor,
    axes: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """Sum of (x - mean)^2 over `axes`, by their number of elements less `correction` (1)."""
    return var_mean(x, axes, correction=correction, keepdim=keepdim)[0]


def var_mean(
    x: Tensor,
    axes: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Variance, see `var`, and mean."""
    axes = list(axes) if axes else list(range(x.dim()))
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    count = 1
    for axis in axes:
        count = count * x.shape[axis]
    below = count - (1 if correction is None else correction)
    found = (centred * centred).sum(axes, keepdim=keepdim) / below
    return found, mean if keepdim else x.mean(axes)


PYTORCHS = (
    aten.native_layer_norm.default,
    aten.leaky_relu.default,
    aten.elu.default,
    aten.linalg_vector_norm.default,
)
"""What PyTorch itself can write in operators that TFLite has."""

FORMS: Decompositions = {
    **cast(Decompositions, get_decompositions(PYTORCHS)),
    **UNTRANSPOSED,
    **composed_operators.FORMS,
    aten.avg_pool2d.default: partial(average_pool, axes=2),
    aten.avg_pool3d.default: partial(average_pool, axes=3),
    aten.split_with_sizes.default: split,
    aten.slice_scatter.default: slice_scatter,
    aten.var.correction: var,
    aten.var_mean.correction: var_mean,
    aten._log_softmax.default: log_softmax,
    aten.log1p.default: log1p,
    aten.expm1.default: expm1,
    aten.convolution_backward.default: convolution.backward_with(weight_gradient),
    aten.threshold_backward.default: threshold_backward,
}
