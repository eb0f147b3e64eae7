"""Batch normalisation without running statistics, which instance normalisation is made of."""

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions
from exporters.decompositions.normalisation import batch_norm

aten = torch.ops.aten


def without_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm by the batch's own statistics, none of them kept: y, mean, 1 / sqrt(var + eps)."""
    none = x.new_zeros([x.shape[1]])
    y, mean, inverse, *_ = batch_norm(x, weight, bias, none, none, True, momentum, eps)
    return y, mean, inverse


FORMS: Decompositions = {aten._native_batch_norm_legit.no_stats: without_statistics}
