"""Combinations and covariances: torch's own operators read values or have no fixed size."""

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


STATISTICS: dict[Any, Replacement] = {
    torch.combinations: combinations,
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
}
"""What is recorded in place of each of these functions."""
