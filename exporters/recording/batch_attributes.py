"""Sets attributes such as `self.batch_size` to the number of samples of each batch.

With this, code that makes its first state with `torch.zeros(1, self.batch_size, 64)` runs for every
batch.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import SymInt, nn

NAME = re.compile(r"_?(batch_?size|n_?batch|batch|bsz?)", re.IGNORECASE)
"""Names of attributes that hold the number of samples."""


def set_batch_size(model: nn.Module, size: int | SymInt) -> None:
    """Set the whole numbers in attributes with names such as `batch_size` to `size`.

    The attributes may also be in a configuration object that is an attribute of a module. Call this
    function with a copy of the model.
    """
    for module in model.modules():
        for space in (vars(module), *configurations(module)):
            for name, value in space.items():
                if isinstance(name, str) and type(value) is int and NAME.fullmatch(name):
                    space[name] = size


def configurations(module: nn.Module) -> Iterator[dict[Any, Any]]:
    """The dictionaries, and the attributes of plain objects, that are attributes of `module`."""
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, nn.Module):
            continue
        if type(value) is dict:
            yield value
        elif type(value).__module__ != "builtins" and isinstance(
            getattr(value, "__dict__", None), dict
        ):
            yield vars(value)
