"""Computes products of several tensors, and products with a number that depends on the batch."""

import torch
from torch import SymFloat, Tensor

from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten
LETTERS = "abcdefgh"


def trilinear(
    first: Tensor,
    second: Tensor,
    third: Tensor,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Sum over the axes `sumdim` of first * second * third.

    Bilinear layers and their gradients use this operator. The lists `expand1`, `expand2` and
    `expand3` name the missing axes of the three factors. Each factor is broadcast along its missing
    axes.
    """
    letters = LETTERS[: first.dim() + len(expand1)]

    def without(axes: list[int]) -> str:
        return "".join(letter for axis, letter in enumerate(letters) if axis not in axes)

    operands = ",".join(map(without, (expand1, expand2, expand3)))
    return torch.einsum(f"{operands}->{without(sumdim)}", first, second, third)


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """Compute sqrt(x^2 + y^2)."""
    return torch.sqrt(x * x + y * y)


def multiply(x: Tensor, number: float | SymFloat) -> Tensor:
    """Compute x * number for a number that depends on the batch size.

    The number becomes a tensor without axes. Returns NotImplemented for other numbers.
    """
    if not isinstance(number, SymFloat):
        return NotImplemented  # type: ignore[no-any-return]
    return x * aten.scalar_tensor(number, dtype=x.dtype)  # type: ignore[no-any-return]


SYMBOLIC_FACTORS: Decompositions = {aten.mul.Scalar: multiply}
"""For writers that treat every number argument of an operator as a constant."""

DECOMPOSITIONS: Decompositions = {aten._trilinear.default: trilinear, aten.hypot.default: hypot}
