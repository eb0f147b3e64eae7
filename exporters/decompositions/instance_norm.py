"""Batch normalisation without running statistics, as instance normalisation uses it."""

import torch
from torch import Tensor

from exporters.decompositions.batch_norm import batch_norm
from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten


def without_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm with the statistics of the batch. Returns y, mean and 1 / sqrt(var + eps)."""
    # `batch_norm` wants running statistics; the new ones are dropped.
    none = x.new_zeros([x.shape[1]])
    y, mean, inverse, *_ = batch_norm(x, weight, bias, none, none, True, momentum, eps)
    return y, mean, inverse


DECOMPOSITIONS: Decompositions = {aten._native_batch_norm_legit.no_stats: without_statistics}
