"""The multi-label margin loss as operators that both formats have."""

from typing import Any

import torch
from torch import Tensor


def multilabel_margin_loss(
    _: Any,
    input: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    """`multilabel_margin_loss`: each of a sample's classes is compared with all other classes.

    Args:
        input: Scores (batch, classes), or (classes,).
        target: Classes in the shape of `input`; those of a sample end at the first -1.
    """
    own = ((target < 0).int().cumsum(-1) == 0).to(input.dtype)
    classes = target.clamp(min=0)
    hits = (classes.unsqueeze(-1) == torch.arange(input.shape[-1])) * own.unsqueeze(-1)
    others = 1 - hits.amax(-2)
    margins = 1 - input.gather(-1, classes).unsqueeze(-1) + input.unsqueeze(-2)
    each = margins.relu() * own.unsqueeze(-1) * others.unsqueeze(-2)
    loss: Tensor = each.sum((-2, -1)) / input.shape[-1]
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()
