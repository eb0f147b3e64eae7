"""Uniform numbers, which a training step draws from a seed, and normal numbers from them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Sizes = Sequence[int | torch.SymInt]


def uniform(shape: Sizes) -> Tensor:
    """Draw numbers between 0 and 1. A device draws neither 0 nor 1."""
    drawn: Tensor = torch.ops.aten.rand.default(list(shape))
    return drawn


def standard_normal(shape: Sizes) -> Tensor:
    """Draw normal numbers by the transformation of Box and Muller: sqrt(-2 ln u) cos(2 pi v)."""
    radius = (-2 * uniform(shape).log()).sqrt()
    return radius * (2 * math.pi * uniform(shape)).cos()
