"""Decompositions of training-only operators into forward operators: one table for all runtimes.

Each module has one group of operators as `DECOMPOSITIONS`, a dict from operator to function. Start
with `activation.py`, the shortest module. If PyTorch decomposes an operator well (elementwise
derivatives, softmax), the decomposition comes from PyTorch's core table. If only one runtime needs
a decomposition, it does not belong in this table: the writer for this runtime passes it to `trace`.
"""

from functools import cache
from typing import Any

from torch._decomp import core_aten_decompositions

from exporters.decompositions import (
    activation,
    adaptive_pooling,
    attention,
    average_pooling,
    batch_norm,
    convolution,
    extremes,
    layer_norm,
    max_pooling,
    multiply_add,
    padding,
    shape,
)
from exporters.decompositions.decomposition import Decomposition, Decompositions

GROUPS: tuple[Decompositions, ...] = (
    activation.DECOMPOSITIONS,
    adaptive_pooling.DECOMPOSITIONS,
    attention.DECOMPOSITIONS,
    average_pooling.DECOMPOSITIONS,
    convolution.DECOMPOSITIONS,
    extremes.DECOMPOSITIONS,
    layer_norm.DECOMPOSITIONS,
    batch_norm.DECOMPOSITIONS,
    padding.DECOMPOSITIONS,
    max_pooling.DECOMPOSITIONS,
    multiply_add.DECOMPOSITIONS,
    shape.DECOMPOSITIONS,
)


def merge(groups: tuple[Decompositions, ...]) -> Decompositions:
    """Merge `groups` into one table. Raises ValueError if two groups have the same operator."""
    merged: Decompositions = {}
    for group in groups:
        for operator, decomposition in group.items():
            if operator in merged:
                raise ValueError(
                    f"{operator} is decomposed twice: by {merged[operator].__qualname__} and "
                    f"{decomposition.__qualname__}. Keep one."
                )
            merged[operator] = decomposition
    return merged


core_decompositions = cache(core_aten_decompositions)
"""PyTorch's table, cached because PyTorch would build it again at each call."""


def table() -> dict[Any, Decomposition]:
    """PyTorch's core decompositions, or this package's own decompositions if there are any."""
    return {**core_decompositions(), **merge(GROUPS)}
