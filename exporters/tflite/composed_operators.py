"""Decomposes operators that TFLite does not have into operators that all writers have."""

import math
from collections.abc import Sequence
from functools import reduce
from itertools import product

import torch
from torch import Tensor

from exporters.decompositions.average_pooling import Windows, several
from exporters.decompositions.decomposition import Decompositions
from exporters.decompositions.strided_slices import cut

aten = torch.ops.aten


HALF_PI = (1.5703125, 4.837512969970703e-4, 7.549789948768648e-8)
"""pi / 2 in three parts. The first has so few digits that small multiples are exact in float32."""


def tan(x: Tensor) -> Tensor:
    """tan(x) = sin(r) / cos(r), or -cos(r) / sin(r) for odd n, with r = x - n pi / 2 closest to 0.

    cos(x) has an absolute error of about float32's rounding of 1. Near a zero of cos, this is a
    large relative error, so that sin(x) / cos(x) would be inaccurate.
    """
    n = torch.round(x * (2 / math.pi))
    r = x
    for part in HALF_PI:
        r = r - n * part
    sin, cos = torch.sin(r), torch.cos(r)
    odd = torch.remainder(n, 2) == 1
    return torch.where(odd, -cos, sin) / torch.where(odd, sin, cos)


def atan(x: Tensor) -> Tensor:
    """The angle of the point (1, x)."""
    return torch.atan2(x, torch.ones_like(x))


def asin(x: Tensor) -> Tensor:
    """The angle of the point (sqrt(1 - x^2), x)."""
    return torch.atan2(x, torch.sqrt((1 - x) * (1 + x)))


def acos(x: Tensor) -> Tensor:
    """The angle of the point (x, sqrt(1 - x^2))."""
    return torch.atan2(torch.sqrt((1 - x) * (1 + x)), x)


def sinh(x: Tensor) -> Tensor:
    """(exp(x) - exp(-x)) / 2."""
    return (torch.exp(x) - torch.exp(-x)) * 0.5


def cosh(x: Tensor) -> Tensor:
    """(exp(x) + exp(-x)) / 2."""
    return (torch.exp(x) + torch.exp(-x)) * 0.5


def asinh(x: Tensor) -> Tensor:
    """sign(x) log(|x| + sqrt(x^2 + 1))."""
    size = torch.abs(x)
    return torch.sign(x) * torch.log(size + torch.sqrt(size * size + 1))


def log2(x: Tensor) -> Tensor:
    """log(x) / log(2)."""
    return torch.log(x) * (1 / math.log(2))


def log10(x: Tensor) -> Tensor:
    """log(x) / log(10)."""
    return torch.log(x) * (1 / math.log(10))


def roll(x: Tensor, shifts: Sequence[int], axes: Sequence[int] = ()) -> Tensor:
    """Move the last `shift` elements of each axis to the front.

    Returns NotImplemented if there are no `axes`, because then PyTorch rolls the flattened tensor.
    """
    if not axes:
        return NotImplemented  # type: ignore[no-any-return]
    for shift, axis in zip(shifts, axes, strict=True):
        size = x.shape[axis]
        first = size - shift % size
        if first != size:
            x = torch.cat([x.narrow(axis, first, size - first), x.narrow(axis, 0, first)], axis)
    return x


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The diagonal with column - row = `offset`, as the last axis.

    All other elements are set to 0, and then the rows are summed.
    """
    moved = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = moved.shape[-2:]
    on_it = torch.arange(columns) - torch.arange(rows).unsqueeze(1) == offset
    by_row = torch.where(on_it, moved, 0.0).sum(-1)
    if isinstance(rows, torch.SymInt) and offset == 0:  # products of samples with each other
        return by_row
    rows, columns = int(rows), int(columns)
    first = max(-offset, 0)
    return by_row.narrow(-1, first, max(min(rows - first, columns - max(offset, 0)), 0))


def unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Windows of `size` elements along `dim`, `step` apart. Their elements are the last axis."""
    count = (int(x.shape[dim]) - size) // step + 1
    return torch.stack([cut(x, dim, position, step, count) for position in range(size)], -1)


def reflection_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    """Pad the last axes with mirror images, which do not repeat the elements at the ends.

    `padding` is (front, behind) of the last axis, then of the second-last axis. Returns
    NotImplemented for a negative width.
    """
    if min(padding) < 0:
        return NotImplemented  # type: ignore[no-any-return]
    for number, (front, behind) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        axis = x.dim() - 1 - number
        last = int(x.shape[axis]) - 1
        parts = [x]
        if front:
            parts.insert(0, x.narrow(axis, 1, front).flip(axis))
        if behind:
            parts.append(x.narrow(axis, last - behind, behind).flip(axis))
        x = torch.cat(parts, axis)
    return x


def reflection_pad_backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Mirror the gradient of the padding back and add it. `reflection_pad` describes `padding`."""
    if min(padding) < 0:
        return NotImplemented  # type: ignore[no-any-return]
    for number, (front, behind) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        axis = x.dim() - 1 - number
        size = int(x.shape[axis])
        total = grad.narrow(axis, front, size)
        for start, count, before in ((0, front, 1), (front + size, behind, size - 1 - behind)):
            if count:
                mirrored = grad.narrow(axis, start, count).flip(axis)
                around = [0, 0] * number + [before, size - before - count]
                total = total + aten.constant_pad_nd(mirrored, around)
        grad = total
    return grad


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) / sqrt(var + eps) * w + b, with mean and variance of each group of a sample.

    Returns y, mean and 1 / sqrt(var + eps).
    """
    grouped = x.reshape(samples, groups, channels // groups * pixels)
    centred = grouped - grouped.mean(2, keepdim=True)
    inverse = torch.rsqrt((centred * centred).mean(2, keepdim=True) + eps)
    y = (centred * inverse).reshape(x.shape)
    along = [1, channels, *[1] * (x.dim() - 2)]
    y = y if weight is None else y * weight.reshape(along)
    y = y if bias is None else y + bias.reshape(along)
    return y, grouped.mean(2), inverse.squeeze(2)


def max_pool(
    x: Tensor,
    kernel: list[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Max pooling with a dilated window: the maximum of shifted slices.

    Returns NotImplemented for windows without dilation. An `x` of three axes is one image. The
    indices are zeros, because no operator here reads them.
    """
    if x.dim() == 3:
        window = (kernel, stride, padding, dilation, ceil_mode)
        best, indices = aten.max_pool2d_with_indices(x.unsqueeze(0), *window)
        return best.squeeze(0), indices.squeeze(0)
    reach = several(list(dilation), 2)
    if reach == [1, 1]:
        return NotImplemented  # type: ignore[no-any-return]
    kernel, fronts = several(kernel, 2), several(list(padding), 2)
    steps = several(list(stride), 2) if stride else kernel
    high, wide = (
        Windows(int(x.shape[2 + a]), reach[a] * (kernel[a] - 1) + 1, steps[a], fronts[a], ceil_mode)
        for a in (0, 1)
    )
    frame = [wide.front, wide.behind, high.front, high.behind]
    framed = aten.constant_pad_nd(x, frame, -math.inf)
    slices = [
        cut(
            cut(framed, 2, row * reach[0], high.step, high.count),
            3, column * reach[1], wide.step, wide.count,
        )
        for row, column in product(range(kernel[0]), range(kernel[1]))
    ]  # fmt: skip
    best = reduce(torch.maximum, slices)
    # Writers need a tensor for every result, although no operator reads this one.
    return best, torch.zeros_like(best, dtype=torch.int64)


def largest(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The maximum along an axis and the index of its first occurrence."""
    return x.amax(dim, keepdim=keepdim), x.argmax(dim, keepdim=keepdim)


def smallest(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The minimum along an axis and the index of its first occurrence."""
    return x.amin(dim, keepdim=keepdim), x.argmin(dim, keepdim=keepdim)


def truncated_quotient(x: Tensor, y: Tensor | float, rounding_mode: str | None = None) -> Tensor:
    """x / y, rounded towards zero. Returns NotImplemented for other modes of rounding."""
    if rounding_mode != "trunc":
        return NotImplemented  # type: ignore[no-any-return]
    down = torch.div(x, y, rounding_mode="floor")
    return torch.where((down < 0) & (down * y != x), down + 1, down)


def floor_quotient(x: Tensor, y: Tensor | float) -> Tensor:
    """x / y, rounded down."""
    return torch.div(x, y, rounding_mode="floor")


def fmod(x: Tensor, y: Tensor | float) -> Tensor:
    """The remainder of x / y with the sign of x."""
    rest = torch.remainder(x.abs(), y.abs() if isinstance(y, Tensor) else abs(y))
    return torch.where(x < 0, -rest, rest)


def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return `source` with the shape and type of `x`."""
    return source.to(x.dtype).expand(x.shape)


def drop_assertion(*arguments: object, **options: object) -> None:
    """Drop an assertion about the data: a graph cannot raise an error."""


FORMS: Decompositions = {
    aten.tan.default: tan,
    aten.atan.default: atan,
    aten.asin.default: asin,
    aten.acos.default: acos,
    aten.sinh.default: sinh,
    aten.cosh.default: cosh,
    aten.asinh.default: asinh,
    aten.log2.default: log2,
    aten.log10.default: log10,
    aten.roll.default: roll,
    aten.diagonal.default: diagonal,
    aten.unfold.default: unfold,
    aten.reflection_pad1d.default: reflection_pad,
    aten.reflection_pad2d.default: reflection_pad,
    aten.reflection_pad1d_backward.default: reflection_pad_backward,
    aten.reflection_pad2d_backward.default: reflection_pad_backward,
    aten.native_group_norm.default: group_norm,
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max.dim: largest,
    aten.min.dim: smallest,
    aten.div.Tensor_mode: truncated_quotient,
    aten.div.Scalar_mode: truncated_quotient,
    aten.floor_divide.default: floor_quotient,
    aten.fmod.Tensor: fmod,
    aten.fmod.Scalar: fmod,
    aten.copy.default: copy,
    aten._assert_async.msg: drop_assertion,
    aten._assert_tensor_metadata.default: drop_assertion,
}
