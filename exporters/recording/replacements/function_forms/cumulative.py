"""Products along an axis, and cumulative products and extremes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exporters.recurrence.replacements import Replacement

LARGEST_PRODUCT = 256
"""A product over an axis with more factors than this is recorded as torch's own operator."""
Computes = Callable[..., Tensor]


def prod(func: Computes, input: Tensor, *given: Any, **more: Any) -> Tensor:
    """`torch.prod` over one axis: multiply both halves, until one element is left.

    The gradient is correct even if elements are zero.
    """
    dim = more.get("dim", given[0] if given else None)
    keepdim = more.get("keepdim", given[1] if len(given) > 1 else False)
    if type(dim) is not int or input.dim() == 0 or more.get("dtype") is not None:
        return func(input, *given, **more)
    size = input.shape[dim]
    if (
        not isinstance(size, int)
        or not 0 < size <= LARGEST_PRODUCT
        or not input.is_floating_point()
    ):
        return func(input, *given, **more)
    while size > 1:
        half = size // 2
        product = input.narrow(dim, 0, half) * input.narrow(dim, half, half)
        rest = [input.narrow(dim, 2 * half, 1)] if size % 2 else []
        input = torch.cat([product, *rest], dim) if rest else product
        size = half + len(rest)
    return input if keepdim else input.squeeze(dim)


def cumprod(func: Computes, input: Tensor, dim: int, **more: Any) -> Tensor:
    """`torch.cumprod`. In each round, each product covers twice as many factors as before."""
    size = input.shape[dim] if input.dim() else 0
    if more or not isinstance(size, int) or not 0 < size <= LARGEST_PRODUCT:
        return func(input, dim, **more)
    input = input if input.is_floating_point() else input.to(torch.int64)
    shift = 1
    while shift < size:
        ones = torch.ones_like(input.narrow(dim, 0, shift))
        input = input * torch.cat([ones, input.narrow(dim, 0, size - shift)], dim)
        shift *= 2
    return input


def cummax(func: Any, input: Tensor, dim: int, better: Any = torch.ge) -> Any:
    """`torch.cummax`: in each round, the maximum of twice as many elements."""
    size = input.shape[dim] if input.dim() else 0
    if not isinstance(size, int) or not 0 < size <= LARGEST_PRODUCT:
        return func(input, dim)
    along = [1] * input.dim()
    along[dim] = size
    largest, indices = input.detach(), torch.arange(size).view(along).expand(input.shape)
    shift = 1
    while shift < size:
        # The first elements are compared with themselves. Of equal elements, the last one counts.
        before, place = (
            torch.cat([v.narrow(dim, 0, shift), v.narrow(dim, 0, size - shift)], dim)
            for v in (largest, indices)
        )
        keep = better(largest, before)
        largest, indices = torch.where(keep, largest, before), torch.where(keep, indices, place)
        shift *= 2
    return torch.return_types.cummax((input.gather(dim, indices), indices))


def cummin(func: Any, input: Tensor, dim: int) -> Any:
    """`torch.cummin`."""
    found: tuple[Tensor, Tensor] = cummax(func, input, dim, torch.le)
    return torch.return_types.cummin(found)


CUMULATIVE: dict[Any, Replacement] = {
    torch.prod: prod,
    Tensor.prod: prod,
    torch.cumprod: cumprod,
    Tensor.cumprod: cumprod,
    torch.cummax: cummax,
    Tensor.cummax: cummax,
    torch.cummin: cummin,
    Tensor.cummin: cummin,
}
"""Maps a function of torch to the function that is recorded in its place."""
