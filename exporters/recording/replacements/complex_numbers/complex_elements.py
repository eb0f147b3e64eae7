"""Functions of complex numbers z = a + bi, as computations of their parts a and b."""

from collections.abc import Callable

import torch
from torch import Tensor

Parts = tuple[Tensor, Tensor]


def size(a: Tensor, b: Tensor) -> Tensor:
    """|z|; as in PyTorch, its gradient at zero is zero."""
    found: Tensor = torch.linalg.vector_norm(torch.stack([a, b], -1), dim=-1)
    return found


def exponential(a: Tensor, b: Tensor) -> Parts:
    """e^z."""
    return a.exp() * b.cos(), a.exp() * b.sin()


def logarithm(a: Tensor, b: Tensor) -> Parts:
    """The principal value of ln z."""
    return (a.square() + b.square()).log() / 2, torch.atan2(b, a)


def root(a: Tensor, b: Tensor) -> Parts:
    """The principal square root of z."""
    half, length = torch.atan2(b, a) / 2, size(a, b).sqrt()
    return length * half.cos(), length * half.sin()


def hyperbolic_sine(a: Tensor, b: Tensor) -> Parts:
    """sinh z."""
    up, down = a.exp(), (-a).exp()
    return (up - down) / 2 * b.cos(), (up + down) / 2 * b.sin()


def hyperbolic_cosine(a: Tensor, b: Tensor) -> Parts:
    """cosh z."""
    up, down = a.exp(), (-a).exp()
    return (up + down) / 2 * b.cos(), (up - down) / 2 * b.sin()


def sine(a: Tensor, b: Tensor) -> Parts:
    """sin z = -i sinh iz."""
    real, imag = hyperbolic_sine(-b, a)
    return imag, -real


def cosine(a: Tensor, b: Tensor) -> Parts:
    """cos z = cosh iz."""
    return hyperbolic_cosine(-b, a)


def hyperbolic_tangent(a: Tensor, b: Tensor) -> Parts:
    """tanh z = (tanh 2a + i s sin 2b) / (1 + s cos 2b) with s = 1 / cosh 2a."""
    small = (-2 * a.abs()).exp()
    s = 2 * small / (1 + small.square())
    below = 1 + s * (2 * b).cos()
    return (2 * a).tanh() / below, s * (2 * b).sin() / below


def logistic(a: Tensor, b: Tensor) -> Parts:
    """1 / (1 + e^-z)."""
    real, imag = hyperbolic_tangent(a / 2, b / 2)
    return (real + 1) / 2, imag / 2


def sign(a: Tensor, b: Tensor) -> Parts:
    """z / |z|, and zero for zero."""
    length = size(a, b)
    length = torch.where(length > 0, length, 1)
    return a / length, b / length


def reciprocal(a: Tensor, b: Tensor) -> Parts:
    """1 / z."""
    square = a.square() + b.square()
    return a / square, -b / square


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Parts]] = {
    "exp": exponential,
    "log": logarithm,
    "sqrt": root,
    "sinh": hyperbolic_sine,
    "cosh": hyperbolic_cosine,
    "sin": sine,
    "cos": cosine,
    "tanh": hyperbolic_tangent,
    "sigmoid": logistic,
    "sgn": sign,
    "reciprocal": reciprocal,
    "conj": lambda a, b: (a, -b),
    "conj_physical": lambda a, b: (a, -b),
    "resolve_conj": lambda a, b: (a, b),
    "resolve_neg": lambda a, b: (a, b),
    "adjoint": lambda a, b: (a.mT, -b.mT),
}
"""The functions by their names in torch."""
