"""Gradients of replication padding, which repeats the edge of an image."""

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten


def replication_backward(grad: Tensor, x: Tensor, padding: list[int]) -> Tensor:
    """Add the gradients of padded elements to the edge element that these elements repeat.

    `padding` has (front, behind) of the last axis, then of the second-last axis, and so on. Returns
    NotImplemented for negative padding.
    """
    if min(padding) < 0:
        return NotImplemented  # type: ignore[no-any-return]
    for number, (front, behind) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        axis = x.dim() - 1 - number
        if front or behind:
            grad = fold_edges(grad, axis, int(x.shape[axis]), front)
    return grad


def fold_edges(grad: Tensor, axis: int, size: int, front: int) -> Tensor:
    """Crop `grad` to `size` elements along `axis` and add the cropped parts to the edges."""
    # A single element is both the first and the last.
    if size == 1:
        return grad.sum(axis, keepdim=True)
    length = int(grad.shape[axis])
    last = front + size - 1
    parts = [
        grad.narrow(axis, 0, front + 1).sum(axis, keepdim=True),
        grad.narrow(axis, front + 1, size - 2),
        grad.narrow(axis, last, length - last).sum(axis, keepdim=True),
    ]
    return torch.cat(parts if size > 2 else parts[::2], axis)


DECOMPOSITIONS: Decompositions = {
    aten.replication_pad1d_backward.default: replication_backward,
    aten.replication_pad2d_backward.default: replication_backward,
    aten.replication_pad3d_backward.default: replication_backward,
}
