"""Strided slices of images and their inverse: what windows of convolutions and pooling are."""

import torch
from torch import Tensor

aten = torch.ops.aten


def cut(x: Tensor, axis: int, start: int, step: int, count: int) -> Tensor:
    """`count` elements along `axis`, from `start`, every `step`-th."""
    return aten.slice(x, axis, start, start + step * (count - 1) + 1, step)  # type: ignore[no-any-return]


def stuff(x: Tensor, stride: list[int]) -> Tensor:
    """Zeros behind each element: (N, C, H, W) to (N, C, H * stride[0], W * stride[1]).

    As many of the last axes as there are strides.
    """
    lead, tail = x.shape[: -len(stride)], x.shape[-len(stride) :]
    pads: list[int] = []
    for axis in range(len(stride)):
        x = x.unsqueeze(x.dim() - 2 * axis)
        pads += [0, stride[-1 - axis] - 1, 0, 0]
    padded = aten.constant_pad_nd(x, pads)
    return padded.reshape([*lead, *(n * s for n, s in zip(tail, stride, strict=True))])  # type: ignore[no-any-return]
