"""Arithmetic of several tensors at once."""

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
    """Sum over the axes `sumdim` of first * second * third; each is constant along its `expand`.

    It is what bilinear layers and their gradients are made of.
    """
    letters = LETTERS[: first.dim() + len(expand1)]

    def without(axes: list[int]) -> str:
        return "".join(letter for axis, letter in enumerate(letters) if axis not in axes)

    operands = ",".join(map(without, (expand1, expand2, expand3)))
    return torch.einsum(f"{operands}->{without(sumdim)}", first, second, third)


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """sqrt(x^2 + y^2)."""
    return torch.sqrt(x * x + y * y)


def times(x: Tensor, number: float | SymFloat) -> Tensor:
    """x * number, where the number follows from the batch as a tensor of no axes."""
    if not isinstance(number, SymFloat):
        return NotImplemented  # type: ignore[no-any-return]
    return x * aten.scalar_tensor(number, dtype=x.dtype)  # type: ignore[no-any-return]


NUMBERS: Decompositions = {aten.mul.Scalar: times}
"""For writers that take a number in an operator for a constant."""

FORMS: Decompositions = {aten._trilinear.default: trilinear, aten.hypot.default: hypot}
