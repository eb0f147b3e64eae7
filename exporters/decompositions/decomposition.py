"""Types of decompositions."""

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

Decomposition = Callable[..., Any]
"""Takes an operator's arguments and computes its results with forward operators.

It may return NotImplemented to keep the operator for these arguments."""

Decompositions = dict[OpOverload[..., Any], Decomposition]
"""The decompositions of one group of operators."""
