"""Max pooling in ceil mode, and gradients of max pooling with overlap, padding or dilation."""

import math

import torch
from torch import Tensor

from exporters.decompositions.average_pooling import several, windows
from exporters.decompositions.decomposition import Decompositions
from exporters.decompositions.strided_slices import cut, stuff

aten = torch.ops.aten
LOWEST = torch.finfo(torch.float32).min
"""Padding value instead of -inf: the difference of two infinities would be nan."""


def max_pool(
    x: Tensor,
    kernel: list[int],
    stride: list[int] = [],  # noqa: B006 - ATen's schema
    padding: list[int] = [0],  # noqa: B006
    dilation: list[int] = [1],  # noqa: B006
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Max pooling in ceil mode: plain pooling of an image that is padded to fit the last windows.

    Runtimes treat the last window differently: PyTorch drops a window that starts outside of the
    image. Returns NotImplemented for pooling without ceil mode, because runtimes compute this
    correctly.
    """
    if not ceil_mode:
        return NotImplemented  # type: ignore[no-any-return]
    kernel, dilation = several(kernel, 2), several(dilation, 2)
    stride = several(stride, 2) if stride else kernel
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    high, wide = (max(w.behind - w.front, 0) for w in windows(x, spans, stride, padding, True, 2))
    framed = aten.constant_pad_nd(x, [0, wide, 0, high], -math.inf) if high or wide else x
    largest, indices = aten.max_pool2d_with_indices(framed, kernel, stride, padding, dilation)
    if wide:  # an index is row * width + column: convert it to the width of `x`
        width, wider = int(x.shape[-1]), int(framed.shape[-1])
        indices = torch.div(indices, wider, rounding_mode="floor") * width + indices % wider
    return largest, indices


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
    """Add the gradient of each window to the window's first maximum, as in PyTorch.

    `x` is (N, C, H, W) and `grad` is (N, C, H', W'), or both without the first axis. The maximum is
    computed again from shifted slices, because runtimes return different indices of pooling.
    """
    if x.dim() == 3:
        grad, x = grad.unsqueeze(0), x.unsqueeze(0)
        window = (kernel, stride, padding, dilation, ceil_mode)
        return max_pool_backward(grad, x, *window, indices).squeeze(0)
    kernel, padding, dilation = several(kernel, 2), several(padding, 2), several(dilation, 2)
    stride = several(stride, 2) if stride else kernel
    out = [int(size) for size in grad.shape[2:]]
    spans = [(out[a] - 1) * stride[a] + dilation[a] * (kernel[a] - 1) + 1 for a in (0, 1)]
    behind = [spans[a] - int(x.shape[2 + a]) - padding[a] for a in (0, 1)]
    edges = [padding[1], behind[1], padding[0], behind[0]]
    framed = aten.constant_pad_nd(x, edges, LOWEST) if any(edges) else x
    starts = [
        (i * dilation[0], j * dilation[1]) for i in range(kernel[0]) for j in range(kernel[1])
    ]
    slices = [
        cut(cut(framed, 2, row, stride[0], out[0]), 3, column, stride[1], out[1])
        for row, column in starts
    ]
    # Without overlap, the parts only need to be interleaved; otherwise they are added up.
    if stride == kernel and dilation == [1, 1]:
        total = interleave(split_gradient(grad, slices), kernel)
    else:
        total = torch.zeros_like(framed)
        for share, start in zip(split_gradient(grad, slices), starts, strict=True):
            total = total + scatter_slice(share, start, stride, spans)
    if not any(edges):
        return total
    return aten.constant_pad_nd(total, [-edge for edge in edges])  # type: ignore[no-any-return]


def split_gradient(grad: Tensor, slices: list[Tensor]) -> list[Tensor]:
    """Split `grad` into one part per slice. A slice has the values at one position of each window.

    The gradient of a window goes to the first slice that has the window's maximum.
    """
    best, larger = slices[0], [torch.ones_like(slices[0], dtype=torch.bool)]
    for values in slices[1:]:
        larger.append(values > best)
        best = torch.maximum(best, values)
    # The last slice that raised the maximum is the first one that holds it. Going backwards, it
    # takes the whole gradient and leaves nothing for earlier slices.
    left, parts = grad, []
    for mask in reversed(larger):
        part = left * mask.to(left.dtype)
        parts.append(part)
        left = left - part
    return parts[::-1]


def interleave(parts: list[Tensor], kernel: list[int]) -> Tensor:
    """Interleave `parts` (N, C, H', W'), one per position in a window, to an image."""
    rows, columns = kernel
    batch, channels, high, wide = parts[0].shape
    # All tensors have four axes, so that the runtime can keep its blocked layout of images.
    bands = [
        torch.cat(
            [p.reshape(batch, channels, high * wide, 1) for p in parts[row : row + columns]], 3
        ).reshape(batch, channels, high, wide * columns)
        for row in range(0, rows * columns, columns)
    ]
    return torch.cat(bands, 3).reshape(batch, channels, high * rows, wide * columns)


def scatter_slice(
    values: Tensor, start: tuple[int, int], stride: list[int], spans: list[int]
) -> Tensor:
    """Invert a strided slice: put `values` at their positions in zeros of shape (.., *spans)."""
    stuffed = stuff(values, stride)
    behind = [spans[a] - start[a] - int(stuffed.shape[2 + a]) for a in (0, 1)]
    return aten.constant_pad_nd(stuffed, [start[1], behind[1], start[0], behind[0]])  # type: ignore[no-any-return]


DECOMPOSITIONS: Decompositions = {
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
