"""Tensors that are known when a graph is traced."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def constant(values: object, dtype: torch.dtype | None = None) -> Tensor:
    """`values` as a tensor with data, which tracing keeps as the graph's own."""
    with _disable_current_modes():
        return torch.tensor(values, dtype=dtype)
