"""Adaptive pooling: the number of windows is given, and the window sizes differ by at most one.

Window o of n along an axis of s elements covers the elements from floor(o s / n) up to, but not
including, ceil((o + 1) s / n).
"""

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions, constant
from exporters.decompositions.max_pooling import LOWEST, split_gradient

aten = torch.ops.aten


def window_bounds(size: int, count: int) -> list[tuple[int, int]]:
    """The (start, end) of each of `count` windows on an axis of `size`; `end` is not included."""
    return [(o * size // count, -(-(o + 1) * size // count)) for o in range(count)]


def regular_kernel(x: Tensor, out: list[int]) -> list[int] | None:
    """If all windows are equal and do not overlap, the kernel of plain pooling; else None."""
    sizes = [int(n) for n in x.shape[-2:]]
    if any(size % count for size, count in zip(sizes, out, strict=True)):
        return None
    return [size // count for size, count in zip(sizes, out, strict=True)]


def average_pool(x: Tensor, out: list[int]) -> Tensor:
    """y = A x B^T, where A (rows', rows) averages rows and B (columns', columns) columns."""
    kernel = regular_kernel(x, out)
    if kernel is not None:
        return aten.avg_pool2d(x, kernel)  # type: ignore[no-any-return]
    rows, columns = (
        averaging_matrix(int(n), count, x) for n, count in zip(x.shape[-2:], out, strict=True)
    )
    return torch.matmul(rows, x @ columns.transpose(0, 1))


def average_pool_backward(grad: Tensor, x: Tensor) -> Tensor:
    """dX = A^T grad B, or the gradient of plain average pooling if all windows are equal."""
    out = [int(n) for n in grad.shape[-2:]]
    kernel = regular_kernel(x, out)
    if kernel is not None:
        options = (kernel, kernel, [0, 0], False, True, None)
        return aten.avg_pool2d_backward(grad, x, *options)  # type: ignore[no-any-return]
    rows, columns = (
        averaging_matrix(int(n), count, x) for n, count in zip(x.shape[-2:], out, strict=True)
    )
    return torch.matmul(rows.transpose(0, 1), grad @ columns)


def averaging_matrix(size: int, count: int, x: Tensor) -> Tensor:
    """Matrix (count, size) whose row o averages over window o, in the type of `x`."""
    rows = [
        [1 / (end - start) if start <= position < end else 0.0 for position in range(size)]
        for start, end in window_bounds(size, count)
    ]
    return constant(rows, dtype=x.dtype)


def max_pool(x: Tensor, out: list[int]) -> tuple[Tensor, Tensor]:
    """The maximum of each window, and the index row * columns + column of its first occurrence."""
    kernel = regular_kernel(x, out)
    if kernel is not None:
        return aten.max_pool2d_with_indices(x, kernel)  # type: ignore[no-any-return]
    slices, positions = window_slices(x, out)
    best, where = slices[0], positions[0].expand_as(slices[0])
    for values, position in zip(slices[1:], positions[1:], strict=True):
        where = torch.where(values > best, position, where)
        best = torch.maximum(best, values)
    return best, where


def max_pool_backward(grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """Add the gradient of each window to the first maximum of this window in `x`.

    dX = sum of R^T share C over all positions in a window. share (.., rows', columns') is the part
    of the gradient that goes to this position. R (rows', rows) and C (columns', columns) are
    one-hot. They map the position in each window to a row and a column of the image.
    """
    out = [int(n) for n in grad.shape[-2:]]
    kernel = regular_kernel(x, out)
    if kernel is not None:
        return max_pool_backward_of_tiles(grad, x, kernel)
    slices, _ = window_slices(x, out)
    rows, columns = (
        elements_by_position(int(n), count) for n, count in zip(x.shape[-2:], out, strict=True)
    )
    total = torch.zeros_like(x)
    pairs = [(row, column) for row in rows for column in columns]
    for share, (row, column) in zip(split_gradient(grad, slices), pairs, strict=True):
        left = one_hot(row, int(x.shape[-2]), x).transpose(0, 1)
        total = total + torch.matmul(left, share @ one_hot(column, int(x.shape[-1]), x))
    return total


def max_pool_backward_of_tiles(grad: Tensor, x: Tensor, kernel: list[int]) -> Tensor:
    """`max_pool_backward` for windows that do not overlap: one comparison for all positions."""
    lead, (rows, columns) = list(grad.shape[:-2]), kernel
    high, wide = (int(n) for n in grad.shape[-2:])
    tiles = x.reshape([*lead, high, rows, wide, columns]).transpose(-3, -2)
    # argmax returns the first of equal elements, as the forward pass does.
    first = tiles.reshape([*lead, high, wide, rows * columns]).argmax(-1, keepdim=True)
    chosen = first == torch.arange(rows * columns)
    spread = torch.where(chosen, grad.unsqueeze(-1), 0.0)
    tiles = spread.reshape([*lead, high, wide, rows, columns]).transpose(-3, -2)
    return tiles.reshape([*lead, high * rows, wide * columns])


def elements_by_position(size: int, count: int) -> list[list[int]]:
    """The index of the element at each position in a window, for every window.

    The number of positions is the length of the longest window. The index is -1 for positions after
    the end of a shorter window.
    """
    limits = window_bounds(size, count)
    longest = max(end - start for start, end in limits)
    return [[s + i if s + i < e else -1 for s, e in limits] for i in range(longest)]


def window_slices(x: Tensor, out: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """For each position in a window, take the values at this position from all windows.

    Returns the values and their indices, for positions in row order. If a window is too short for a
    position, its value there is LOWEST.
    """
    height, width = (int(n) for n in x.shape[-2:])
    slices, positions = [], []
    for row in elements_by_position(height, out[0]):
        strip = x.index_select(-2, constant([max(i, 0) for i in row]))
        for column in elements_by_position(width, out[1]):
            # An index of -1 is read as 0 and its value then replaced by LOWEST.
            values = strip.index_select(-1, constant([max(j, 0) for j in column]))
            inside = [[i >= 0 and j >= 0 for j in column] for i in row]
            slices.append(torch.where(constant(inside), values, LOWEST))
            positions.append(constant([[i * width + j for j in column] for i in row]))
    return slices, positions


def one_hot(positions: list[int], size: int, x: Tensor) -> Tensor:
    """Matrix (count, size) with a 1 at each row's position. A row for position -1 is zero."""
    rows = [[1.0 * (position == column) for column in range(size)] for position in positions]
    return constant(rows, dtype=x.dtype)


DECOMPOSITIONS: Decompositions = {
    aten._adaptive_avg_pool2d.default: average_pool,
    aten._adaptive_avg_pool2d_backward.default: average_pool_backward,
    aten.adaptive_max_pool2d.default: max_pool,
    aten.adaptive_max_pool2d_backward.default: max_pool_backward,
}
