"""Inverses, determinants, solutions and Cholesky factors of small matrices, as other operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exporters.recurrence.replacements import Replacement

LARGEST = 32
"""Matrices with more rows than this are left to torch's own operators."""
Computes = Callable[..., Any]
TYPES: Any = torch.return_types
"""Named tuples; torch does not declare all of them."""


def is_small(matrix: Tensor) -> bool:
    """Whether `matrix` (..., n, n) has a fixed and small n."""
    size = matrix.shape[-1]
    return isinstance(size, int) and size <= LARGEST


def eliminated(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `matrix` (..., n, n) and its pivots (..., n), with the signs of row swaps.

    Gauss-Jordan elimination with partial pivoting; it has no gradient of its own.
    """
    size, pivots = matrix.shape[-1], []
    unit = unit_like(matrix)
    rows = torch.cat([matrix.detach(), unit.expand(matrix.shape)], -1)
    for step in range(size):
        here = unit[step]
        below = torch.where(torch.arange(size) >= step, rows[..., step].abs(), -1.0)
        best = (below.argmax(-1, keepdim=True) == torch.arange(size)).to(matrix.dtype)
        swapped = (best.unsqueeze(-2) @ rows).squeeze(-2)
        rows = rows + (here - best).unsqueeze(-1) * (swapped - rows[..., step, :]).unsqueeze(-2)
        pivot = swapped[..., step]
        pivots.append(pivot * (2 * best[..., step] - 1))
        scaled = swapped / pivot.unsqueeze(-1)
        rows = rows - (rows[..., step] - here).unsqueeze(-1) * scaled.unsqueeze(-2)
    return rows[..., size:], torch.stack(pivots, -1)


def inverse(func: Computes, input: Tensor) -> Any:
    """`torch.linalg.inv`.

    The last step is one step of Newton's method, with the gradient of the inverse Y: dY = -Y dA Y.
    """
    if not is_small(input):
        return func(input)
    return corrected(input, eliminated(input)[0])


def corrected(matrix: Tensor, inverse: Tensor) -> Tensor:
    """A step of Newton's method from the constant `inverse` of `matrix`: Y + Y (1 - A Y)."""
    return inverse + inverse @ (unit_like(matrix) - matrix @ inverse)


def unit_like(matrix: Tensor) -> Tensor:
    """The unit matrix of the size of `matrix`. `torch.eye` has integers that TFLite lacks."""
    places = torch.arange(matrix.shape[-1])
    return (places[:, None] == places).to(matrix.dtype)


def solve(func: Computes, A: Tensor, B: Tensor, **more: Any) -> Any:  # noqa: N803 - names of torch
    """`torch.linalg.solve`."""
    if not is_small(A) or more:
        return func(A, B, **more)
    vectors = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
    solution = inverse(func, A) @ (B.unsqueeze(-1) if vectors else B)
    return solution.squeeze(-1) if vectors else solution


def slogdet(func: Computes, input: Tensor) -> Any:
    """`torch.linalg.slogdet`: the sign and the logarithm. The gradient of ln |A| is A^-T."""
    if not is_small(input):
        return func(input)
    inverse, pivots = eliminated(input)
    change = (corrected(input.detach(), inverse) * (input - input.detach()).mT).sum((-2, -1))
    logarithm = pivots.abs().log().sum(-1) + change
    sign = pivots.sign()[..., 0]
    for step in range(1, pivots.shape[-1]):
        sign = sign * pivots.sign()[..., step]
    return TYPES.linalg_slogdet((sign, logarithm))


def det(func: Computes, input: Tensor) -> Any:
    """`torch.linalg.det` of matrices that have an inverse."""
    if not is_small(input):
        return func(input)
    sign, logarithm = slogdet(func, input)
    return sign * logarithm.exp()


def logdet(func: Computes, input: Tensor) -> Any:
    """`torch.logdet`; nan for a negative determinant."""
    if not is_small(input):
        return func(input)
    sign, logarithm = slogdet(func, input)
    return torch.where(sign < 0, float("nan"), logarithm)


def cholesky(func: Computes, input: Tensor, *, upper: bool = False) -> Any:
    """`torch.linalg.cholesky`, column by column."""
    size = input.shape[-1]
    if not is_small(input):
        return func(input, upper=upper)
    half = (input + input.mT) / 2
    input = input.detach() + half - half.detach()  # torch's gradient is also symmetric
    columns: list[Tensor] = []
    for step in range(size):
        rest = input[..., :, step]
        if columns:
            known = torch.stack(columns, -1)
            rest = rest - (known @ known[..., step, :].unsqueeze(-1)).squeeze(-1)
        below = torch.where(torch.arange(size) >= step, rest, 0.0)
        columns.append(below / rest[..., step : step + 1].sqrt())
    factor = torch.stack(columns, -1)
    return factor.mT if upper else factor


def solve_triangular(
    func: Computes,
    A: Tensor,  # noqa: N803 - its name in torch
    B: Tensor,  # noqa: N803
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Any:
    """`torch.linalg.solve_triangular`, by substitution: each row of the solution uses earlier rows.

    The density of a `MultivariateNormal` needs it.
    """
    size = A.shape[-1]
    if not isinstance(size, int) or size > LARGEST:
        return func(A, B, upper=upper, left=left, unitriangular=unitriangular)
    if not left:
        A, B, upper = A.mT, B.mT, not upper  # noqa: N806
    rows: dict[int, Tensor] = {}
    for row in reversed(range(size)) if upper else range(size):
        rest = B[..., row, :]
        if rows:
            known = A[..., row, min(rows) : max(rows) + 1].unsqueeze(-2)
            rest = rest - (known @ torch.stack([rows[n] for n in sorted(rows)], -2)).squeeze(-2)
        rows[row] = rest if unitriangular else rest / A[..., row, row].unsqueeze(-1)
    solution = torch.stack([rows[n] for n in range(size)], -2)
    return solution if left else solution.mT


SMALL_MATRICES: dict[Any, Replacement] = {
    torch.linalg.solve_triangular: solve_triangular,
    **dict.fromkeys((torch.inverse, Tensor.inverse, torch.linalg.inv), inverse),
    torch.linalg.solve: solve,
    **dict.fromkeys((torch.slogdet, Tensor.slogdet, torch.linalg.slogdet), slogdet),
    **dict.fromkeys((torch.det, Tensor.det, torch.linalg.det), det),
    **dict.fromkeys((torch.logdet, Tensor.logdet), logdet),
    torch.linalg.cholesky: cholesky,
}
"""Maps a function of torch to the function that is recorded in its place."""
