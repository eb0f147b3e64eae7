"""A context that replaces functions of torch."""

from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any

from torch.overrides import TorchFunctionMode

LOCK = RLock()
"""Held while functions of torch are replaced for all threads."""
Replacement = Callable[..., Any]
"""Takes the replaced function, then its arguments, under the names that torch gives them."""
NUMPYS = {"axis": "dim", "keepdims": "keepdim"}
"""NumPy's names of arguments, which torch understands as well."""


class Replacements(TorchFunctionMode):
    """Context that calls other functions instead of some functions of torch.

    Use one context for all replacements, because torch passes every call through each active
    context.
    """

    def __init__(self, replacements: Mapping[Any, Replacement]) -> None:
        """`replacements` has the replacement of each function."""
        super().__init__()
        self.replacements = replacements

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the replacement of `func`, or `func` itself."""
        replacement = self.replacements.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        named = {NUMPYS.get(name, name): value for name, value in (kwargs or {}).items()}
        return replacement(func, *args, **named)
