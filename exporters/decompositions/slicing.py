"""Strided slices of images and their inverse: what windows of convolutions and pooling are."""

import torch
from torch import Tensor

aten = torch.ops.aten


def cut(x: Tensor, axis: int, start: int, step: int, count: int) -> Tensor:
    """`count` elements along `axis`, from `start`, every `step`-th."""
    return aten.slice(x, axis, start, start + step * (count - 1) + 1, step)  # type: ignore[no-any-return]


def stuff(x: Tensor, stride: list[int]) -> Tensor:
    """Zeros behind each element: (N, C, H, W) to (N, C, H * stride[0], W * stride[1])."""
    batch, channels, rows, columns = x.shape
    apart = x.unsqueeze(3).unsqueeze(5)
    padded = aten.constant_pad_nd(apart, [0, stride[1] - 1, 0, 0, 0, stride[0] - 1])
    return padded.reshape(batch, channels, rows * stride[0], columns * stride[1])  # type: ignore[no-any-return]
