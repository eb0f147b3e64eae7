"""Replaces composite operators, which the decomposition table cannot replace.

The table never gets composite operators, because autograd first splits them into simpler operators.
"""

from typing import Any

import torch
from torch import Tensor

from exporters.programs.grid_sampling import affine_grid, grid_sample
from exporters.recurrence.replacements import Replacement, Replacements

aten = torch.ops.aten
POOLS = {
    aten.adaptive_avg_pool1d.default: 1,
    aten.adaptive_avg_pool2d.default: 2,
    aten.adaptive_avg_pool3d.default: 3,
}
"""Adaptive average poolings, and the number of axes that each pools."""


def average_pool(func: Any, x: Tensor, output_size: Any) -> Any:
    """Pool `x`. For the output size 1, compute a mean. For other sizes, call `func`.

    For size 1, PyTorch writes through strides if the channels are last in memory.
    """
    axes = POOLS[func]
    sizes = [output_size] if isinstance(output_size, int) else list(output_size)
    if any(size != 1 for size in sizes):
        return func(x, output_size)
    return x.mean(list(range(-axes, 0)), keepdim=True)


def functional_pad(
    func: Any, x: Tensor, pads: list[int], mode: str = "constant", value: Any = None
) -> Any:
    """Pad `x`. Circular padding concatenates slices of `x`. Other modes call `func`."""
    if mode != "circular" or min(pads) < 0:
        return func(x, pads, mode, value)
    # `pads` lists the last axis first.
    for number, (front, behind) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        axis = x.dim() - 1 - number
        size = x.shape[axis]
        ends = [x.narrow(axis, size - front, front), x, x.narrow(axis, 0, behind)]
        x = torch.cat([end for end in ends if end.shape[axis]], axis)
    return x


def cosine_similarity(
    func: Any, first: Tensor, second: Tensor, dim: int = 1, eps: float = 1e-8
) -> Tensor:
    """Sum over `dim` of a * b / (max(|a|, eps) * max(|b|, eps)), with |.| the norm over `dim`."""
    pair: list[Tensor] = torch.broadcast_tensors(first, second)  # type: ignore[no-untyped-call]
    norms = [torch.linalg.vector_norm(x, dim=dim, keepdim=True) for x in pair]
    a, b = (x / torch.where(n > eps, n, eps) for x, n in zip(pair, norms, strict=True))
    total: Tensor = (a * b).sum(dim)
    return total


COMPOSITES: dict[Any, Replacement] = {
    aten.pad.default: functional_pad,
    torch.nn.functional.pad: functional_pad,
    aten.cosine_similarity.default: cosine_similarity,
    torch.cosine_similarity: cosine_similarity,
    aten.grid_sampler.default: grid_sample,
    aten.affine_grid_generator.default: affine_grid,
    **dict.fromkeys(POOLS, average_pool),
}
"""Operators with in-place writes, strides or gradients that no format has, and their
replacements."""


class Composites(Replacements):
    """Context that replaces the operators in `COMPOSITES`."""

    def __init__(self) -> None:
        super().__init__(COMPOSITES)
