"""Types of decompositions, and constants for the graphs that they trace."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

Decomposition = Callable[..., Any]
"""Takes an operator's arguments and computes its results with forward operators.

It may return NotImplemented to keep the operator for these arguments."""

Decompositions = dict[OpOverload[..., Any], Decomposition]
"""The decompositions of one group of operators."""


def constant(values: object, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of `values` that the traced graph stores as a constant."""
    # Under the tracing modes, the tensor would be fake and without data.
    with _disable_current_modes():
        return torch.tensor(values, dtype=dtype)
