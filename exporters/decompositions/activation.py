"""Gradients of activations, written with operators that runtimes compute fast."""

import math

import torch
from torch import Tensor
from torch._decomp import decompositions as torchs

from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """dX = grad if x > threshold, else 0."""
    # A product with the mask is twice as fast as a selection by it.
    return grad * (x > threshold).to(grad.dtype)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute x (erf(x / sqrt 2) + 1) / 2, by operators whose order ONNX Runtime knows as one."""
    if approximate != "none":
        return NotImplemented  # type: ignore[no-any-return]
    return x * (torch.erf(x / math.sqrt(2)) + 1) * 0.5


def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    """dX = grad (1 + erf(t) + 2 / sqrt(pi) t exp(-t^2)) / 2 for t = x / sqrt(2)."""
    if approximate != "none":
        return torchs.gelu_backward(grad, x, approximate)  # type: ignore[no-any-return]
    t = x * math.sqrt(0.5)
    # The exponent takes the factor in: one pass less over the tensor.
    bell = t * torch.exp(math.log(2 / math.sqrt(math.pi)) - t * t)
    return (grad * 0.5) * (torch.erf(t) + bell + 1)


def hardsigmoid(x: Tensor) -> Tensor:
    """The operator itself, which the runtime has."""
    return NotImplemented  # type: ignore[no-any-return]


def hardswish(x: Tensor) -> Tensor:
    """Compute x * hardsigmoid(x)."""
    return x * aten.hardsigmoid(x)  # type: ignore[no-any-return]


def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """dX = grad * (hardsigmoid(x) + x / 6 where |x| < 3), without a selection."""
    inside = x * (x.abs() < 3).to(x.dtype)
    # The number comes last: with the sum, it takes one pass over a blocked tensor.
    return grad * (aten.hardsigmoid(x) + inside * (1 / 6))  # type: ignore[no-any-return]


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
}
