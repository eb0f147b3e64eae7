"""What a decomposition is."""

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

Decomposition = Callable[..., Any]
"""Takes an operator's arguments and returns its results, made of forward operators."""

Decompositions = dict[OpOverload[..., Any], Decomposition]
"""The forms of one group of operators."""
