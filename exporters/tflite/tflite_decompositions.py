"""Decompositions that only the TFLite writer uses.

Some decompositions use operators that XNNPACK (LiteRT's fast library) has. Others replace operators
that TFLite does not have. All of them take precedence over the table that all writers share.
"""

import math
import sys
from collections.abc import Sequence
from functools import partial, reduce
from typing import cast

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx.experimental.symbolic_shapes import statically_known_true

from exporters.decompositions import convolution, shape
from exporters.decompositions.average_pooling import corrected, windows
from exporters.decompositions.decomposition import Decompositions, constant
from exporters.decompositions.strided_slices import cut, stuff
from exporters.tflite import composed_operators
from exporters.tflite.grouped_convolutions import (
    CONVOLUTIONS,
    depthwise_weight_gradient,
)

aten = torch.ops.aten


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, window: convolution.Window) -> Tensor:
    """dW as a sum over samples of (rows * O, positions) times (positions, columns * I).

    Positions are the places of pixels in the lines of the padded image. At each position, the right
    factor contains the pixels of one kernel row side by side. The left factor contains one copy of
    `grad` for each kernel row. The copy is shifted down by the lines between this row and the first
    row. If the vertical stride is above 1, each kernel row has its own product. Groups are computed
    as if they were samples.
    """
    outputs, inputs, rows, columns = weight.shape
    if inputs == 1 < window.groups:
        return depthwise_weight_gradient(grad, x, weight, window)
    samples, _, high, wide = grad.shape
    batch, outputs = samples * window.groups, outputs // window.groups
    above, left = window.padding
    image = aten.constant_pad_nd(x, [left, left, above, above])
    image = image.reshape(batch, inputs, *image.shape[2:]).permute(0, 2, 3, 1)
    strip = torch.cat(
        [cut(image, 2, n * window.dilation[1], window.stride[1], wide) for n in range(columns)], 3
    )
    # XNNPACK copies a transposed left factor. Transpose `grad` once, before it is repeated.
    grads = grad.reshape(batch, outputs, high * wide)
    grads = grads.clone(memory_format=torch.contiguous_format)

    def summed(products: Tensor) -> Tensor:
        by_group = products.reshape(samples, window.groups, *products.shape[1:])
        return by_group.sum(0)

    if window.stride[0] > 1:
        products = []
        for row in range(rows):
            part = cut(strip, 1, row * window.dilation[0], window.stride[0], high)
            part = part.reshape(batch, high * wide, columns * inputs)
            products.append(summed(torch.bmm(grads, part)))
        sums = torch.stack(products, 1)
    else:
        lines = image.shape[1]
        shifts = [row * window.dilation[0] for row in range(rows)]
        moved = [
            aten.constant_pad_nd(grads, [shift * wide, (lines - high - shift) * wide])
            for shift in shifts
        ]
        strip = strip.reshape(batch, lines * wide, columns * inputs)
        sums = summed(torch.bmm(torch.cat(moved, 1), strip))
    sums = sums.reshape(window.groups, rows, outputs, columns, inputs).permute(0, 2, 4, 1, 3)
    return sums.reshape(weight.shape)


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
    """The mean of each window: the sum of shifted slices / the divisors of `corrected`."""
    along = windows(x, kernel, list(stride), list(padding), ceil_mode, axes)
    total: Tensor = aten.constant_pad_nd(
        x, [n for w in reversed(along) for n in (w.front, w.behind)]
    )
    # Sum along one axis after the other: kh + kw additions for each mean instead of kh * kw.
    for axis, w in enumerate(along, x.dim() - axes):
        total = reduce(torch.add, [cut(total, axis, n, w.step, w.count) for n in range(w.kernel)])
    means = total * (1 / math.prod(w.kernel for w in along))
    return corrected(means, along, count_include_pad, divisor_override)


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """dX = grad * ceil(min(z, 1)) with z = relu(x - threshold): grad if x > threshold, else 0.

    XNNPACK (LiteRT's fast library) has these operators, but it has no comparisons and no sign. An
    operator that XNNPACK does not have splits the graph in two. Before the split, XNNPACK runs all
    operators whose inputs are known, and their results stay in memory.
    """
    return grad * positive(x - threshold if threshold else x)


def positive(x: Tensor) -> Tensor:
    """1 if x > 0, else 0."""
    return torch.ceil(aten.hardtanh(torch.relu(x), -1.0, 1.0))


def hardtanh_backward(grad: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """dX = grad if low < x < high, else 0. ReLU6 is a hardtanh."""
    return grad * positive(x - low) * positive(high - x)


def leaky_relu_backward(grad: Tensor, x: Tensor, slope: float, is_result: bool) -> Tensor:
    """dX = grad if x > 0, else slope * grad. `x` may be the result, which has the same sign."""
    return grad * (positive(x) * (1 - slope) + slope)


def hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    """dX = grad / 6 if |x| < 3, else 0."""
    return hardtanh_backward(grad, x, -3.0, 3.0) * (1 / 6)


def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """dX = grad * (hardsigmoid(x) + x / 6 where |x| < 3)."""
    inside = positive(x + 3) * positive(3 - x) * (1 / 6)
    return grad * ((x + 3).clamp(0, 6) * (1 / 6) + x * inside)


def log_softmax(x: Tensor, axis: int, half_to_float: bool) -> Tensor:
    """z - log(sum(exp(z))) with z = x - max(x)."""
    # exp of numbers up to 0 cannot overflow.
    moved = x - x.amax(axis, keepdim=True)
    return moved - torch.log(torch.exp(moved).sum(axis, keepdim=True))


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1."""
    return torch.exp(x) - 1


def split(x: Tensor, sizes: Sequence[int], axis: int = 0) -> list[Tensor]:
    """Split one axis into consecutive parts of `sizes`."""
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
    """Replace a slice of `x` by `part`: concatenate it with the elements before and after it.

    If `step` is above 1, zeros are put between the elements of `part`. Then a selection takes the
    elements of `part` at their positions, and the elements of `x` at all other positions.
    """
    if step == 1 and statically_known_true(part.shape[axis] == x.shape[axis]):
        return part
    if not isinstance(x.shape[axis], int):
        if step != 1:
            return NotImplemented  # type: ignore[no-any-return]
        ahead_of = [aten.slice.Tensor(x, axis, 0, start)] if start != 0 else []
        open_ended = end is None or (isinstance(end, int) and end >= sys.maxsize)
        rest = [] if open_ended else [aten.slice.Tensor(x, axis, end, sys.maxsize)]
        return torch.cat([*ahead_of, part, *rest], axis)
    first, last, _ = slice(start, end).indices(int(x.shape[axis]))
    if step != 1:
        axis %= x.dim()
        taken = range(first, last, step)
        spaced = stuff(part.movedim(axis, -1), [step])
        spaced = aten.constant_pad_nd(spaced, [first, x.shape[axis] - first - spaced.shape[-1]])
        inside = constant([n in taken for n in range(x.shape[axis])])
        return torch.where(inside, spaced, x.movedim(axis, -1)).movedim(-1, axis)
    ahead, behind = first, int(x.shape[axis]) - last
    pieces = [cut(x, axis, 0, 1, ahead)] if ahead else []
    pieces.append(part)
    pieces += [cut(x, axis, last, 1, behind)] if behind else []
    return torch.cat(pieces, axis)


def absolute(x: Tensor) -> Tensor:
    """|x| of integers, which TFLite's ABS does not accept. Returns NotImplemented for floats."""
    if x.is_floating_point():
        return NotImplemented  # type: ignore[no-any-return]
    return torch.maximum(x, -x)


def var(
    x: Tensor,
    axes: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """Sum of (x - mean)^2 over `axes`, divided by (number of elements - `correction`).

    The default correction is 1.
    """
    return var_mean(x, axes, correction=correction, keepdim=keepdim)[0]


def var_mean(
    x: Tensor,
    axes: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """The variance (see `var`) and the mean."""
    axes = list(axes) if axes else list(range(x.dim()))
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    count = 1
    for axis in axes:
        count = count * x.shape[axis]
    below = count - (1 if correction is None else correction)
    variance = (centred * centred).sum(axes, keepdim=keepdim) / below
    return variance, mean if keepdim else x.mean(axes)


def is_nan(x: Tensor) -> Tensor:
    """Whether each element is nan: only nan differs from itself."""
    return x != x


def is_infinite(x: Tensor) -> Tensor:
    """Whether each number is infinite."""
    return torch.eq(x.abs(), math.inf)


def scatter_value(x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    """Put `value` at the positions `index` of `x`."""
    ones = torch.ones(index.shape, dtype=x.dtype)
    written = torch.zeros_like(x).scatter_add(dim, index, ones) > 0
    return torch.where(written, value, x)


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """ATen's `scatter_reduce`. For each place of `x`, an extreme is found among all of `src`.

    So the memory for an extreme grows with the product of both sizes. TFLite has no operator that
    needs less.
    """
    if reduce not in ("amax", "amin"):
        return shape.scatter_reduce(x, dim, index, src, reduce, include_self=include_self)
    dim %= x.dim()
    places = torch.arange(x.shape[dim]).view(-1, *[1] * (x.dim() - dim))
    here = index.unsqueeze(dim) == places
    limit = torch.finfo(x.dtype).min if reduce == "amax" else torch.finfo(x.dtype).max
    found = torch.where(here, src.unsqueeze(dim), limit)
    found = found.amax(dim + 1) if reduce == "amax" else found.amin(dim + 1)
    if include_self:
        return torch.maximum(x, found) if reduce == "amax" else torch.minimum(x, found)
    return torch.where(here.to(x.dtype).sum(dim + 1) > 0, found, x)


def bucketize(
    x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    """The number of `boundaries` below (with `right`: not above) each number of `x`."""
    values = x.unsqueeze(-1)
    below = boundaries <= values if right else boundaries < values
    # float32 counts exactly, and every runtime adds it.
    counts = below.to(torch.float32).sum(-1)
    return counts.to(torch.int32 if out_int32 else torch.int64)


DECOMPOSED_BY_PYTORCH = (
    aten.native_layer_norm.default,
    aten.leaky_relu.default,
    aten.elu.default,
    aten.linalg_vector_norm.default,
)
"""Operators that PyTorch's own decompositions express with operators that TFLite has."""

FORMS: Decompositions = {
    **cast(Decompositions, get_decompositions(DECOMPOSED_BY_PYTORCH)),
    **CONVOLUTIONS,
    **composed_operators.FORMS,
    aten.avg_pool2d.default: partial(average_pool, axes=2),
    aten.avg_pool3d.default: partial(average_pool, axes=3),
    aten.bucketize.Tensor: bucketize,
    aten.split_with_sizes.default: split,
    aten.slice_scatter.default: slice_scatter,
    aten.abs.default: absolute,
    aten.isnan.default: is_nan,
    aten.isinf.default: is_infinite,
    aten.scatter.value: scatter_value,
    aten.scatter_reduce.two: scatter_reduce,
    aten.var.correction: var,
    aten.var_mean.correction: var_mean,
    aten._log_softmax.default: log_softmax,
    aten.expm1.default: expm1,
    aten.convolution_backward.default: convolution.backward_with(weight_gradient),
    aten.threshold_backward.default: threshold_backward,
    aten.hardtanh_backward.default: hardtanh_backward,
    aten.leaky_relu_backward.default: leaky_relu_backward,
    aten.hardsigmoid_backward.default: hardsigmoid_backward,
    aten.hardswish_backward.default: hardswish_backward,
}
