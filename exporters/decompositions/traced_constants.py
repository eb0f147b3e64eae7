"""Constant tensors in traced graphs."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def constant(values: object, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `values` that the traced graph stores as a constant."""
    # Under the tracing modes, the tensor would be fake and without data.
    with _disable_current_modes():
        return torch.tensor(values, dtype=dtype)
