"""Medians, combinations, covariances, differences and other functions that no runtime has."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exporters.recording.replacements.function_forms.index_forms import constant, eye
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


def gradient(
    func: Any, input: Tensor, *, spacing: Any = 1.0, dim: Any = None, edge_order: int = 1
) -> Any:
    """`torch.gradient` of equally spaced values: central differences, one-sided at the ends."""
    axes = list(range(input.dim())) if dim is None else [dim] if isinstance(dim, int) else [*dim]
    steps = [spacing] * len(axes) if isinstance(spacing, int | float) else [*spacing]
    if not all(isinstance(step, int | float) for step in steps) or edge_order != 1:
        return func(input, spacing=spacing, dim=dim, edge_order=edge_order)
    found = []
    for axis, step in zip(axes, steps, strict=True):
        change = input.diff(dim=axis) / step
        first, last = change.narrow(axis, 0, 1), change.narrow(axis, -1, 1)
        size = change.shape[axis] - 1
        inner = (change.narrow(axis, 0, size) + change.narrow(axis, 1, size)) / 2
        found.append(torch.cat([first, inner, last], axis))
    return found


def isclose(
    _: Any,
    input: Tensor,
    other: Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> Tensor:
    """`torch.isclose`: |a - b| <= atol + rtol |b|, or equal infinite numbers."""
    distance = (input - other).abs()
    close = (distance <= atol + rtol * other.abs()) & (distance < math.inf)
    close = close | (input == other)
    return close | (input.isnan() & other.isnan()) if equal_nan else close


def allclose(_: Any, input: Tensor, other: Tensor, *given: Any, **more: Any) -> bool:
    """`torch.allclose`, for a branch on it."""
    return bool(isclose(None, input, other, *given, **more).all())


def copysign(_: Any, input: Tensor, other: Any) -> Tensor:
    """`torch.copysign`; the sign of a zero counts as positive."""
    return input.abs() * torch.where(torch.as_tensor(other) < 0, -1.0, 1.0)


def sgn(func: Any, input: Tensor) -> Tensor:
    """`torch.sgn`."""
    found: Tensor = func(input) if input.is_complex() else torch.sign(input)
    return found


def vander(
    func: Callable[..., Tensor],
    x: Tensor,
    N: int | None = None,  # noqa: N803
    increasing: bool = False,
) -> Tensor:
    """`torch.vander`: a column for each power."""
    count = x.shape[-1] if N is None else N
    if not isinstance(count, int) or count < 1:
        return func(x, N, increasing)
    powers = range(count) if increasing else reversed(range(count))
    return torch.stack([x**n for n in powers], -1)


def linalg_vander(_: Any, x: Tensor, *, N: int | None = None) -> Tensor:  # noqa: N803
    """`torch.linalg.vander`: ascending powers."""
    return vander(torch.linalg.vander, x, N, increasing=True)


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


def mvlgamma(_: Any, input: Tensor, p: int) -> Tensor:
    """`torch.mvlgamma`: the logarithm of the gamma function in `p` dimensions."""
    parts: Tensor = sum(lgamma(None, input - n / 2) for n in range(p))  # type: ignore[assignment]
    return parts + p * (p - 1) / 4 * math.log(math.pi)


def digamma(func: Any, input: Tensor) -> Tensor:
    """`torch.digamma` of positive numbers, the derivative of `lgamma`."""
    z, near, is_near = far_and_near(input)
    far: Tensor = z.log() - 1 / (2 * z) - 1 / (12 * z**2) + 1 / (120 * z**4) - 1 / (252 * z**6)
    steps = sum(1 / (near + n) for n in range(7))
    return far - steps * is_near


def median(func: Any, input: Tensor, *given: Any, **more: Any) -> Any:
    """`torch.median` along an axis: the lower of the two middle values."""
    dim = more.get("dim", given[0] if given else None)
    if dim is None or not isinstance(input.shape[dim], int):
        return func(input, *given, **more)
    keepdim = more.get("keepdim", given[1] if len(given) > 1 else False)
    return torch.return_types.median(ranked(input, (input.shape[dim] - 1) // 2, dim, keepdim))


def kthvalue(func: Any, input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """`torch.kthvalue`."""
    return torch.return_types.kthvalue(ranked(input, k - 1, dim, keepdim))


def ranked(x: Tensor, rank: int, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The value at position `rank` in ascending order, and its index."""
    values, indices = (part.narrow(dim, rank, 1) for part in x.sort(dim=dim, stable=True))
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


STATISTICS: dict[Any, Replacement] = {
    torch.median: median,
    Tensor.median: median,
    torch.kthvalue: kthvalue,
    Tensor.kthvalue: kthvalue,
    **dict.fromkeys((torch.lgamma, Tensor.lgamma, torch.special.gammaln), lgamma),
    **dict.fromkeys(
        (torch.digamma, Tensor.digamma, torch.special.digamma, torch.special.psi), digamma
    ),
    **dict.fromkeys((torch.mvlgamma, Tensor.mvlgamma, torch.special.multigammaln), mvlgamma),
    torch.combinations: combinations,
    torch.gradient: gradient,
    **dict.fromkeys((torch.isclose, Tensor.isclose), isclose),
    **dict.fromkeys((torch.allclose, Tensor.allclose), allclose),
    **dict.fromkeys((torch.copysign, Tensor.copysign), copysign),
    **dict.fromkeys((torch.sgn, Tensor.sgn), sgn),
    torch.vander: vander,
    torch.linalg.vander: linalg_vander,
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
}
"""Maps a function of torch to the function that is recorded in its place."""
