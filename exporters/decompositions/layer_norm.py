"""The gradients of layer normalisation, in few passes over the tensor."""

import math

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX = r (w dY - mean(w dY) - c r^2 mean(w dY c)) for c = x - mean(x), dW = sum(r dY c).

    The means are over the normalised axes, and the sum is over all other axes. `grad` and `x` have
    the same shape. `mean` and `rstd` (r) have size 1 on the normalised axes. Weighted sums of rows
    are computed as matrix products, which do not write a tensor of the size of `x`.
    """
    width = math.prod(normalized_shape)
    d_y, centred, r = (t.reshape(-1, n) for t, n in ((grad, width), (x - mean, width), (rstd, 1)))
    product = d_y * centred
    d_x = d_weight = d_bias = None
    if output_mask[0]:
        if weight is None:
            scaled, sums = d_y, [t.sum(1, keepdim=True) for t in (d_y, product)]
        else:
            scaled, column = d_y * weight.reshape(width), weight.reshape(width, 1)
            sums = [d_y @ column, product @ column]
        slope = sums[1] * (r * r) / width
        d_x = (r * (scaled - sums[0] / width - centred * slope)).reshape(x.shape)
    if output_mask[1]:
        d_weight = (r.transpose(0, 1) @ product).reshape(normalized_shape)
    if output_mask[2]:
        d_bias = d_y.sum(0).reshape(normalized_shape)
    return d_x, d_weight, d_bias


DECOMPOSITIONS: Decompositions = {aten.native_layer_norm_backward.default: layer_norm_backward}
