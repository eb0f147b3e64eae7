"""Computes gradients of activations with operators that are fast in the runtimes."""

import math

import torch
from torch import Tensor
from torch._decomp import decompositions as torchs

from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """dX = grad if x > threshold, else 0."""
    # Multiplying by the mask is twice as fast as selecting with it.
    return grad * (x > threshold).to(grad.dtype)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute x (erf(x / sqrt 2) + 1) / 2, in the order that ONNX Runtime fuses to one operator."""
    if approximate != "none":
        return NotImplemented  # type: ignore[no-any-return]
    return x * (torch.erf(x / math.sqrt(2)) + 1) * 0.5


def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    """dX = grad (1 + erf(t) + 2 / sqrt(pi) t exp(-t^2)) / 2 for t = x / sqrt(2)."""
    if approximate != "none":
        return torchs.gelu_backward(grad, x, approximate)  # type: ignore[no-any-return]
    t = x * math.sqrt(0.5)
    # The factor is part of the exponent, which saves a pass over the tensor.
    bell = t * torch.exp(math.log(2 / math.sqrt(math.pi)) - t * t)
    return (grad * 0.5) * (torch.erf(t) + bell + 1)


def hardsigmoid(x: Tensor) -> Tensor:
    """Keep the operator, because the runtime has it."""
    return NotImplemented  # type: ignore[no-any-return]


def hardswish(x: Tensor) -> Tensor:
    """Compute x * hardsigmoid(x)."""
    return x * aten.hardsigmoid(x)  # type: ignore[no-any-return]


def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """dX = grad * (hardsigmoid(x) + x / 6 where |x| < 3), without a selection."""
    inside = x * (x.abs() < 3).to(x.dtype)
    # If the number is the second factor, product and sum take one pass over a blocked tensor.
    return grad * (aten.hardsigmoid(x) + inside * (1 / 6))  # type: ignore[no-any-return]


def log1p(x: Tensor) -> Tensor:
    """Compute log(1 + x). For small x, the series is used, because 1 + x would round to 1."""
    return torch.where(x.abs() < 0.01, x * (1 - x * (0.5 - x * (1 / 3))), torch.log(1 + x))


GELU: Decompositions = {aten.gelu.default: gelu}
"""For ONNX Runtime."""

HARD_SIGMOID: Decompositions = {
    aten.hardsigmoid.default: hardsigmoid,
    aten.hardswish.default: hardswish,
    aten.hardswish_backward.default: hardswish_backward,
}
"""For runtimes that have an operator for the hard sigmoid."""

DECOMPOSITIONS: Decompositions = {
    aten.threshold_backward.default: threshold_backward,
    aten.gelu_backward.default: gelu_backward,
    aten.log1p.default: log1p,
}
