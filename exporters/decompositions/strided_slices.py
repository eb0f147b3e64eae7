"""Strided slices of images and their inverse, for the windows of convolutions and pooling."""

import torch
from torch import Tensor

aten = torch.ops.aten


def cut(x: Tensor, axis: int, start: int, step: int, count: int) -> Tensor:
    """Take `count` elements along `axis`, starting at `start`, with distance `step`."""
    return aten.slice(x, axis, start, start + step * (count - 1) + 1, step)  # type: ignore[no-any-return]


def stuff(x: Tensor, stride: list[int]) -> Tensor:
    """Put stride - 1 zeros behind each element along the last axes.

    With two strides, (N, C, H, W) becomes (N, C, H * stride[0], W * stride[1]).
    """
    lead, tail = x.shape[: -len(stride)], x.shape[-len(stride) :]
    pads: list[int] = []
    for axis in range(len(stride)):
        x = x.unsqueeze(x.dim() - 2 * axis)
        pads += [0, stride[-1 - axis] - 1, 0, 0]
    padded = aten.constant_pad_nd(x, pads)
    return padded.reshape([*lead, *(n * s for n, s in zip(tail, stride, strict=True))])  # type: ignore[no-any-return]
