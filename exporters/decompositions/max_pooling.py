"""Max pooling in ceil mode, and its gradient for any window: overlapping, padded, dilated."""

import math

import torch
from torch import Tensor

from exporters.decompositions.average_pooling import windows
from exporters.decompositions.decomposition import Decompositions
from exporters.decompositions.strided_slices import cut, stuff

aten = torch.ops.aten
LOWEST = torch.finfo(torch.float32).min
"""Around an image in place of -inf, of which the difference of two would be no number."""


def max_pool(
    x: Tensor,
    kernel: list[int],
    stride: list[int] = [],  # noqa: B006 - ATen's schema
    padding: list[int] = [0],  # noqa: B006
    dilation: list[int] = [1],  # noqa: B006
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Ceil mode as plain pooling of an image that is large enough for its last windows.

    Runtimes disagree on which windows those are: PyTorch leaves out one that starts outside.
    Pooling without ceil mode is left to them (NotImplemented).
    """
    if not ceil_mode:
        return NotImplemented  # type: ignore[no-any-return]
    kernel, dilation = pair(kernel), pair(dilation)
    stride = pair(stride) if stride else kernel
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    high, wide = (max(w.behind - w.front, 0) for w in windows(x, spans, stride, padding, True, 2))
    framed = aten.constant_pad_nd(x, [0, wide, 0, high], -math.inf) if high or wide else x
    largest, places = aten.max_pool2d_with_indices(framed, kernel, stride, padding, dilation)
    if wide:  # a place is its row times the width, and its column
        width, wider = int(x.shape[-1]), int(framed.shape[-1])
        places = torch.div(places, wider, rounding_mode="floor") * width + places % wider
    return largest, places


def max_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Each window's gradient goes to its first largest element, as PyTorch has it.

    `x` is (N, C, H, W), `grad` (N, C, H', W'), or both without the first axis. The maximum is found
    anew from shifted slices: the indices of a runtime's own pooling are numbered in ways that
    differ.
    """
    if x.dim() == 3:
        grad, x = grad.unsqueeze(0), x.unsqueeze(0)
        window = (kernel, stride, padding, dilation, ceil_mode)
        return max_pool_backward(grad, x, *window, indices).squeeze(0)
    kernel, padding, dilation = pair(kernel), pair(padding), pair(dilation)
    stride = pair(stride) if stride else kernel
    out = [int(size) for size in grad.shape[2:]]
    spans = [(out[a] - 1) * stride[a] + dilation[a] * (kernel[a] - 1) + 1 for a in (0, 1)]
    behind = [spans[a] - int(x.shape[2 + a]) - padding[a] for a in (0, 1)]
    framed = aten.constant_pad_nd(x, [padding[1], behind[1], padding[0], behind[0]], LOWEST)
    starts = [
        (i * dilation[0], j * dilation[1]) for i in range(kernel[0]) for j in range(kernel[1])
    ]
    slices = [
        cut(cut(framed, 2, row, stride[0], out[0]), 3, column, stride[1], out[1])
        for row, column in starts
    ]
    if stride == kernel and dilation == [1, 1]:
        total = side_by_side(shares(grad, slices), kernel)
    else:
        total = torch.zeros_like(framed)
        for share, start in zip(shares(grad, slices), starts, strict=True):
            total = total + spread(share, start, stride, spans)
    return aten.constant_pad_nd(total, [-padding[1], -behind[1], -padding[0], -behind[0]])  # type: ignore[no-any-return]


def pair(sizes: list[int]) -> list[int]:
    """Both sizes of a square one."""
    return list(sizes) * 2 if len(sizes) == 1 else list(sizes)


def shares(grad: Tensor, slices: list[Tensor]) -> list[Tensor]:
    """The part of `grad` that goes to each of `slices`: to the first that holds the maximum."""
    best, larger = slices[0], [torch.ones_like(slices[0], dtype=torch.bool)]
    for values in slices[1:]:
        larger.append(values > best)
        best = torch.maximum(best, values)
    left, parts = grad, []
    for mask in reversed(larger):
        part = left * mask.to(left.dtype)
        parts.append(part)
        left = left - part
    return parts[::-1]


def side_by_side(parts: list[Tensor], kernel: list[int]) -> Tensor:
    """The places of windows that do not overlap: parts (N, C, H', W') to (N, C, rows, columns)."""
    rows, columns = kernel
    batch, channels, high, wide = parts[0].shape
    bands = [
        torch.stack(parts[row * columns : (row + 1) * columns], 4).reshape(
            batch, channels, high, wide * columns
        )
        for row in range(rows)
    ]
    return torch.stack(bands, 3).reshape(batch, channels, high * rows, wide * columns)


def spread(values: Tensor, start: tuple[int, int], stride: list[int], spans: list[int]) -> Tensor:
    """`values` back at the places of a (.., *spans) tensor that a slice took them from."""
    stuffed = stuff(values, stride)
    behind = [spans[a] - start[a] - int(stuffed.shape[2 + a]) for a in (0, 1)]
    return aten.constant_pad_nd(stuffed, [start[1], behind[1], start[0], behind[0]])  # type: ignore[no-any-return]


FORMS: Decompositions = {
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
