"""Replaces `len(x)` of a batch by the size of its first axis: Python would fix the number."""

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from exporters.recurrence.replacements import LOCK

OTHERS = ("torch", "builtins")
"""Packages whose code never takes the length of a batch."""


def length(value: Any) -> Any:
    """`len(value)`. For a batch, it is a size that depends on the batch."""
    if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt):
        return value.shape[0]
    return builtins.len(value)


@contextmanager
def symbolic_len(model: nn.Module) -> Iterator[None]:
    """Context in which the modules with the code of `model` use `length` in place of `len`.

    `len` is not replaced everywhere, because Python calls it far too often.
    """
    classes = {base for layer in model.modules() for base in type(layer).__mro__}
    names = {base.__module__ for base in classes if base.__module__.split(".")[0] not in OTHERS}
    with LOCK:
        spaces = [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules]
        changed = [space for space in spaces if "len" not in space]
        for space in changed:
            space["len"] = length
        try:
            yield
        finally:
            for space in changed:
                del space["len"]
