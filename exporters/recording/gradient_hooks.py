"""Detects hooks with which a model's own code changes gradients. A recording has no hooks.

Hooks and the backward passes of a model's own functions may loop until a value is small. With
random numbers, such a loop may never end. So this module counts how often values are read.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from exporters.programs import source_lines
from profiles.errors import ModelError

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
"""Operators by which Python's code reads a value of a tensor."""
MOST_READS = 1000


class ReadsTooMuch(Exception):  # noqa: N818 - users never see it
    """The code reads values more often than MOST_READS, so it may be in an endless loop."""


class LimitedReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context for code that computes gradients. Raises ReadsTooMuch after MOST_READS reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`; count it if it reads a value."""
        self._reads += func in READS
        if self._reads > MOST_READS:
            raise ReadsTooMuch
        return func(*args, **(kwargs or {}))


class GradientHooks(TorchFunctionMode):
    """Context for a forward pass. The hooks that the pass sets are watched in the backward pass."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`. If it is `register_hook`, watch the hook."""
        if func is Tensor.register_hook and len(args) == 2:
            args = args[0], watched(args[1], source_lines.running_line())
        return func(*args, **(kwargs or {}))


def watched(hook: Callable[[Tensor], Any], line: str) -> Callable[[Tensor], None]:
    """Wrap the `hook` that was set at `line`. If it returns another gradient, it raises ModelError.

    If a hook reads too many values, it is treated like a hook that returns another gradient.
    """

    def watching(gradient: Tensor) -> None:
        try:
            with LimitedReads():
                changed = hook(gradient)
            same = changed is None or changed.equal(gradient)
        except ReadsTooMuch:
            same = False
        if not same:
            raise ModelError(
                "A hook changes a gradient{place}, but a recording does not contain hooks. Leave "
                "the hook out, or write the computation so that it has this gradient. For example, "
                "the gradient of h * 0.1 + (h * 0.9).detach() is a tenth of the gradient of h.",
                code="model.gradient-hook",
                place=source_lines.parenthesized(line),
            )

    return watching
