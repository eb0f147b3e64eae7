"""What a decomposition is."""

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

Form = Callable[..., Any]
"""Takes an operator's arguments and returns its results, made of forward operators."""

Forms = dict[OpOverload[..., Any], Form]
"""The forms of one group of operators."""
