"""The largest and the smallest element of a tensor, as extremes over all of its axes."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten


def over_all_axes(
    x: Tensor, dim: tuple[int, ...] = (), keepdim: bool = False, *, extreme: Callable[..., Tensor]
) -> Tensor:
    """The `extreme` of all elements. In TFLite and ONNX, the axes of an extreme must be named.

    Returns NotImplemented if axes are named.
    """
    if dim or not x.dim():
        return NotImplemented  # type: ignore[no-any-return]
    return extreme(x, [*range(x.dim())], keepdim)


largest = partial(over_all_axes, extreme=aten.amax.default)
smallest = partial(over_all_axes, extreme=aten.amin.default)

DECOMPOSITIONS: Decompositions = {
    aten.max.default: largest,
    aten.min.default: smallest,
    aten.amax.default: largest,
    aten.amin.default: smallest,
}
