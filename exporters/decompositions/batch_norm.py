"""Batch normalisation, forward and backward, in plain arithmetic.

The running variance is biased in ONNX's BatchNormalization and unbiased in PyTorch. Therefore the
statistics are computed here, so that the runtime's definition does not matter.
"""

import math

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten


def over_channels(x: Tensor) -> tuple[list[int], list[int]]:
    """The axes to reduce, and the shape that broadcasts a (channels,) tensor to `x` (N, C, ...)."""
    return [0, *range(2, x.dim())], [1, x.shape[1], *[1] * (x.dim() - 2)]


def values_per_channel(x: Tensor) -> int:
    """The number of values of each channel of `x` (N, C, ...).

    The number is computed from known sizes, because `numel` would add an operator to the graph.
    """
    return x.shape[0] * math.prod(x.shape[2:])


def affine(x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """Compute x * scale + shift for each channel: x (N, C, ...), scale and shift (C,).

    A batch norm with mean 0 and variance 1 does this computation in one pass over `x`.
    """
    if shift is None:
        shift = torch.zeros_like(scale)
    mean, variance = torch.zeros_like(scale), torch.ones_like(scale)
    result: Tensor = aten._native_batch_norm_legit_no_training(
        x, scale, shift, mean, variance, 0.0, 0.0
    )[0]
    return result


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y = (x - mean) * scale + b with scale = w / sqrt(var + eps).

    Returns y, the mean and 1 / sqrt(var + eps) that were used, and the new running statistics. The
    running variance is updated with the unbiased variance, which is n / (n - 1) times var.
    """
    axes, shape = over_channels(x)
    if training:
        mean = x.mean(axes)
        centred = x - mean.reshape(shape)
        var = (centred * centred).mean(axes)
        count = values_per_channel(x)
        unbiased = var * (count / (count - 1))
        running_mean = running_mean * (1 - momentum) + mean * momentum
        running_var = running_var * (1 - momentum) + unbiased * momentum
    else:
        mean, var = running_mean, running_var
    inverse = torch.rsqrt(var + eps)
    scale = inverse if weight is None else inverse * weight
    # Training needs x - mean anyway; otherwise the mean is part of the shift, which saves a pass.
    if training:
        y = affine(centred, scale, bias)
    else:
        y = affine(x, scale, -mean * scale if bias is None else bias - mean * scale)
    return y, mean, inverse, running_mean, running_var


def without_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm without running statistics, as instance normalisation uses it.

    Returns y, mean and 1 / sqrt(var + eps).
    """
    # `batch_norm` needs running statistics; the new ones are not used.
    none = x.new_zeros([x.shape[1]])
    y, mean, inverse, *_ = batch_norm(x, weight, bias, none, none, True, momentum, eps)
    return y, mean, inverse


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    inverse: Tensor | None,
    training: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX = k * grad + p * (x - mean) + q with coefficients (channels,) from sums over the batch.

    With s = sum(grad), t = sum(grad * (x - mean)) and n values per channel: k = w * inverse,
    p = -k / n * inverse^2 * t, q = -k / n * s. Without training, p = q = 0.
    dW = t * inverse, dB = s.
    """
    axes, shape = over_channels(x)
    if not training:
        assert running_mean is not None
        assert running_var is not None
        mean, inverse = running_mean, torch.rsqrt(running_var + eps)
    assert mean is not None
    assert inverse is not None
    total = grad.sum(axes)
    centred = x - mean.reshape(shape)
    moment = (grad * centred).sum(axes)
    k = inverse if weight is None else inverse * weight
    d_weight = moment * inverse
    if training:
        share = k / -values_per_channel(x)
        p = share * inverse * d_weight
        d_x = affine(grad, k, share * total) + centred * p.reshape(shape)
    else:
        d_x = grad * k.reshape(shape)
    return (
        d_x if output_mask[0] else None,
        d_weight if output_mask[1] else None,
        total if output_mask[2] else None,
    )


DECOMPOSITIONS: Decompositions = {
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: without_statistics,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
