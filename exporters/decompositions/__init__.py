"""Forward forms of training-only operators: one table for every runtime.

Each module here holds one group of operators as `FORMS`, a dict from operator to function. What
PyTorch itself decomposes well (elementwise derivatives, softmax, pooling by mean) is taken from
its core table.
"""

from typing import Any

from torch._decomp import core_aten_decompositions

from exporters.decompositions import (
    activation,
    adaptive_pooling,
    attention,
    average_pooling,
    convolution,
    instance_norm,
    max_pooling,
    multiply_add,
    normalisation,
    padding,
    shape,
)
from exporters.decompositions.decomposition import Decomposition, Decompositions

GROUPS: tuple[Decompositions, ...] = (
    activation.FORMS,
    adaptive_pooling.FORMS,
    attention.FORMS,
    average_pooling.FORMS,
    convolution.FORMS,
    instance_norm.FORMS,
    normalisation.FORMS,
    padding.FORMS,
    max_pooling.FORMS,
    multiply_add.FORMS,
    shape.FORMS,
)


def merge(groups: tuple[Decompositions, ...]) -> Decompositions:
    """One table of all `groups`. Raises ValueError where two groups claim one operator."""
    merged: Decompositions = {}
    for group in groups:
        for operator, form in group.items():
            if operator in merged:
                raise ValueError(
                    f"{operator} is decomposed twice: by {merged[operator].__qualname__} and "
                    f"{form.__qualname__}. Keep one."
                )
            merged[operator] = form
    return merged


def table() -> dict[Any, Decomposition]:
    """PyTorch's core decompositions, with the forms of this package in front."""
    return {**core_aten_decompositions(), **merge(GROUPS)}
