"""Computes grid sampling by gathers of pixels. Both formats have the gradients of gathers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exporters.decompositions.decomposition import constant

BILINEAR, NEAREST = 0, 1
ZEROS, BORDER = 0, 1


def grid_sample(
    func: Any, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool
) -> Any:
    """Sample `x` (N, C, H, W) at the points `grid` (N, h, w, 2) between -1 and 1: (N, C, h, w).

    `func` computes all other cases: modes other than bilinear and nearest, padding other than zeros
    and border, and volumes.
    """
    if x.dim() != 4 or mode not in (BILINEAR, NEAREST) or padding not in (ZEROS, BORDER):
        return func(x, grid, mode, padding, align_corners)
    samples, channels, *sizes = x.shape
    # The columns come first in `grid`.
    corners = []
    for position, size in zip(grid.unbind(3), sizes[::-1], strict=True):
        # Without aligned corners, the ends are half a pixel outside of the outermost centers.
        place = (position + 1) * ((size - 1 if align_corners else size) / 2)
        place = place if align_corners else place - 0.5
        if padding == BORDER:
            place = place.clamp(0, size - 1)
        corners.append(around(place, int(size), mode))
    (columns, right), (rows, down) = corners
    pixels = x.permute(0, 2, 3, 1).reshape(-1, channels)
    first = torch.arange(samples, device=x.device).view(-1, 1, 1) * (sizes[0] * sizes[1])
    index, weights = [], []
    for row, row_weight in zip(rows, down, strict=True):
        for column, column_weight in zip(columns, right, strict=True):
            index.append(first + row * sizes[1] + column)
            weights.append(row_weight * column_weight)
    values = pixels[torch.stack(index)] * torch.stack(weights).unsqueeze(4)
    return values.sum(0).permute(0, 3, 1, 2)


def around(place: Tensor, size: int, mode: int) -> tuple[list[Tensor], list[Tensor]]:
    """The pixels of one axis around `place`, and their weights: 0 for pixels outside of the image.

    A pixel outside is replaced by the nearest pixel of the image.
    """
    if mode == NEAREST:
        pixels, weights = [place.round()], [torch.ones_like(place)]
    else:
        lower = place.floor()
        pixels, weights = [lower, lower + 1], [lower + 1 - place, place - lower]
    inside = [(pixel >= 0) & (pixel <= size - 1) for pixel in pixels]
    return (
        [pixel.detach().clamp(0, size - 1).long() for pixel in pixels],
        [torch.where(i, weight, 0) for i, weight in zip(inside, weights, strict=True)],
    )


def affine_grid(func: Any, theta: Tensor, size: Sequence[int], align_corners: bool) -> Any:
    """The points of an image of `size` (N, C, H, W), moved by `theta` (N, 2, 3): (N, H, W, 2).

    `func` is called for volumes.
    """
    if len(size) != 4:
        return func(theta, size, align_corners)
    high, wide = (int(n) for n in size[2:])
    # The numbers of pixels are exact in every type; a constant of positions would be rounded.
    pixels = constant([[x, y, 1] for y in range(high) for x in range(wide)], torch.float32)
    (scale_x, start_x), (scale_y, start_y) = (centers(n, align_corners) for n in (wide, high))
    x, y, one = pixels.to(theta).unbind(1)
    base = torch.stack([x * scale_x + start_x, y * scale_y + start_y, one], 1)
    return (base @ theta.transpose(1, 2)).reshape(-1, high, wide, 2)


def centers(count: int, align_corners: bool) -> tuple[float, float]:
    """Distance and first position of `count` pixels between -1 and 1.

    With `align_corners`, the first pixel is at -1.
    """
    if align_corners:
        return (2 / (count - 1), -1.0) if count > 1 else (0.0, 0.0)
    return 2 / count, 1 / count - 1
