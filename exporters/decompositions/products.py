"""Products of three tensors."""

import torch
from torch import Tensor

from exporters.decompositions.form import Forms

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
    names = ["".join(c for i, c in enumerate(letters) if i not in e) for e in (expand1, expand2, expand3)]
    kept = "".join(c for i, c in enumerate(letters) if i not in sumdim)
    return torch.einsum(f"{','.join(names)}->{kept}", first, second, third)


FORMS: Forms = {aten._trilinear.default: trilinear}
