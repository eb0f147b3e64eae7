"""Combinations, covariances and the gamma function, which no runtime has as operators."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exporters.recording.replacements.index_forms import constant, eye
from exporters.recurrence.replacements import Replacement


def combinations(func: Any, input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """`torch.combinations` of a fixed number of elements, selected by index."""
    if not isinstance(input.shape[0], int):
        return func(input, r, with_replacement)
    return input[constant(places, input.shape[0], r, with_replacement)]


def places(count: int, r: int, with_replacement: bool) -> Tensor:
    """All combinations of `r` indices from 0 to `count` - 1."""
    return torch.combinations(torch.arange(count), r, with_replacement)


def cov(
    _: Any, input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> Tensor:
    """`torch.cov`: rows are variables, columns are observations with weights."""
    x = input if input.dim() == 2 else input.reshape(1, -1)
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    weights = torch.ones_like(x[0])
    for each in (fweights, aweights):
        weights = weights if each is None else weights * each
    total = weights.sum()
    centred = x - (x * weights).sum(1, keepdim=True) / total
    less = 1.0 if aweights is None else (weights * aweights).sum() / total
    found = (centred * weights) @ centred.T / (total - correction * less).clamp(min=0)
    return found if input.dim() == 2 else found.reshape(())


def corrcoef(func: Callable[..., Tensor], input: Tensor) -> Tensor:
    """`torch.corrcoef`: covariances divided by both deviations."""
    if input.dim() < 2:
        return func(input)
    found = cov(torch.cov, input)
    deviations = (found * eye(None, found.shape[0])).sum(1).sqrt()
    return (found / deviations[:, None] / deviations).clamp(-1, 1)


def far_and_near(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors: `x`, or `x` + 7 where x < 8; `x` where x < 8, else 1; and whether x < 8.

    Stirling's series is exact for the numbers in the first tensor.
    """
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    is_near = x < 8
    return torch.where(is_near, x + 7, x), torch.where(is_near, x, 1), is_near.to(x.dtype)


def lgamma(func: Any, input: Tensor) -> Tensor:
    """`torch.lgamma` of positive numbers: ln((x + 6)!) - ln(x (x + 1) ... (x + 6))."""
    z, near, is_near = far_and_near(input)
    series = 1 / (12 * z) - 1 / (360 * z**3) + 1 / (1260 * z**5)
    steps = near
    for n in range(1, 7):
        steps = steps * (near + n)
    far: Tensor = (z - 0.5) * z.log() - z + 0.5 * math.log(2 * math.pi) + series
    return far - steps.abs().log() * is_near


def digamma(func: Any, input: Tensor) -> Tensor:
    """`torch.digamma` of positive numbers, the derivative of `lgamma`."""
    z, near, is_near = far_and_near(input)
    far: Tensor = z.log() - 1 / (2 * z) - 1 / (12 * z**2) + 1 / (120 * z**4) - 1 / (252 * z**6)
    steps = sum(1 / (near + n) for n in range(7))
    return far - steps * is_near


STATISTICS: dict[Any, Replacement] = {
    **dict.fromkeys((torch.lgamma, Tensor.lgamma, torch.special.gammaln), lgamma),
    **dict.fromkeys((torch.digamma, Tensor.digamma, torch.special.digamma), digamma),
    torch.combinations: combinations,
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
}
"""What is recorded in place of each of these functions."""
