"""Gradients of activations, written with operators that runtimes compute fast."""

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """dX = grad if x > threshold, else 0."""
    # A product with the mask is twice as fast as a selection by it.
    return grad * (x > threshold).to(grad.dtype)


DECOMPOSITIONS: Decompositions = {aten.threshold_backward.default: threshold_backward}
