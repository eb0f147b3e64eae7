"""Adaptive pooling: a given number of windows, of sizes that differ by at most one.

Window o of n along an axis of s elements holds those from floor(o s / n) to ceil((o + 1) s / n).
"""

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions
from exporters.decompositions.max_pooling import LOWEST, shares
from exporters.decompositions.traced_constants import constant

aten = torch.ops.aten


def bounds(size: int, count: int) -> list[tuple[int, int]]:
    """First element, and the one after the last, of each of `count` windows."""
    return [(o * size // count, -(-(o + 1) * size // count)) for o in range(count)]


def even(x: Tensor, out: list[int]) -> list[int] | None:
    """The kernel where windows are all alike and side by side, else None."""
    sizes = [int(n) for n in x.shape[-2:]]
    if any(size % count for size, count in zip(sizes, out, strict=True)):
        return None
    return [size // count for size, count in zip(sizes, out, strict=True)]


def average(x: Tensor, out: list[int]) -> Tensor:
    """y = A x B^T: a row of A (rows', rows) holds 1 / elements over a window; B for columns."""
    kernel = even(x, out)
    if kernel is not None:
        return aten.avg_pool2d(x, kernel)  # type: ignore[no-any-return]
    rows, columns = (means(int(n), count, x) for n, count in zip(x.shape[-2:], out, strict=True))
    return torch.matmul(rows, x @ columns.transpose(0, 1))


def average_backward(grad: Tensor, x: Tensor) -> Tensor:
    """dX = A^T grad B, or that of plain average pooling."""
    out = [int(n) for n in grad.shape[-2:]]
    kernel = even(x, out)
    if kernel is not None:
        options = (kernel, kernel, [0, 0], False, True, None)
        return aten.avg_pool2d_backward(grad, x, *options)  # type: ignore[no-any-return]
    rows, columns = (means(int(n), count, x) for n, count in zip(x.shape[-2:], out, strict=True))
    return torch.matmul(rows.transpose(0, 1), grad @ columns)


def means(size: int, count: int, x: Tensor) -> Tensor:
    """(count, size): the mean over each window as a row."""
    rows = [
        [1 / (end - start) if start <= place < end else 0.0 for place in range(size)]
        for start, end in bounds(size, count)
    ]
    return constant(rows, dtype=x.dtype)


def largest(x: Tensor, out: list[int]) -> tuple[Tensor, Tensor]:
    """Each window's largest element and its place, row * columns + column, the first of equals."""
    kernel = even(x, out)
    if kernel is not None:
        return aten.max_pool2d_with_indices(x, kernel)  # type: ignore[no-any-return]
    slices, places = windows(x, out)
    best, where = slices[0], places[0].expand_as(slices[0])
    for values, place in zip(slices[1:], places[1:], strict=True):
        where = torch.where(values > best, place, where)
        best = torch.maximum(best, values)
    return best, where


def largest_backward(grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """Each window's gradient goes to its first largest element, found anew from `x`.

    dX = sum of R^T share C over the places of a window: share (.., rows', columns') is what goes
    to that place, R (rows', rows) and C (columns', columns) say where it lies.
    """
    out = [int(n) for n in grad.shape[-2:]]
    kernel = even(x, out)
    if kernel is not None:
        return largest_of_tiles(grad, x, kernel)
    slices, _ = windows(x, out)
    rows, columns = (picks(int(n), count) for n, count in zip(x.shape[-2:], out, strict=True))
    total = torch.zeros_like(x)
    pairs = [(row, column) for row in rows for column in columns]
    for share, (row, column) in zip(shares(grad, slices), pairs, strict=True):
        left = one_hot(row, int(x.shape[-2]), x).transpose(0, 1)
        total = total + torch.matmul(left, share @ one_hot(column, int(x.shape[-1]), x))
    return total


def largest_of_tiles(grad: Tensor, x: Tensor, kernel: list[int]) -> Tensor:
    """largest_backward where every element is in one window: one comparison for all."""
    lead, (rows, columns) = list(grad.shape[:-2]), kernel
    high, wide = (int(n) for n in grad.shape[-2:])
    tiles = x.reshape([*lead, high, rows, wide, columns]).transpose(-3, -2)
    first = tiles.reshape([*lead, high, wide, rows * columns]).argmax(-1, keepdim=True)
    chosen = first == torch.arange(rows * columns)
    spread = torch.where(chosen, grad.unsqueeze(-1), 0.0)
    tiles = spread.reshape([*lead, high, wide, rows, columns]).transpose(-3, -2)
    return tiles.reshape([*lead, high * rows, wide * columns])


def picks(size: int, count: int) -> list[list[int]]:
    """For each place in the longest window: the element there in every window, -1 outside."""
    limits = bounds(size, count)
    longest = max(end - start for start, end in limits)
    return [[s + i if s + i < e else -1 for s, e in limits] for i in range(longest)]


def windows(x: Tensor, out: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """For each place in a window, row by row: its elements, LOWEST outside, and where they lie."""
    height, width = (int(n) for n in x.shape[-2:])
    slices, places = [], []
    for row in picks(height, out[0]):
        strip = x.index_select(-2, constant([max(i, 0) for i in row]))
        for column in picks(width, out[1]):
            values = strip.index_select(-1, constant([max(j, 0) for j in column]))
            inside = [[i >= 0 and j >= 0 for j in column] for i in row]
            slices.append(torch.where(constant(inside), values, LOWEST))
            places.append(constant([[i * width + j for j in column] for i in row]))
    return slices, places


def one_hot(places: list[int], size: int, x: Tensor) -> Tensor:
    """(count, size) with a 1 in each row at its place, none where that is -1."""
    rows = [[1.0 * (place == column) for column in range(size)] for place in places]
    return constant(rows, dtype=x.dtype)


FORMS: Decompositions = {
    aten._adaptive_avg_pool2d.default: average,
    aten._adaptive_avg_pool2d_backward.default: average_backward,
    aten.adaptive_max_pool2d.default: largest,
    aten.adaptive_max_pool2d_backward.default: largest_backward,
}
