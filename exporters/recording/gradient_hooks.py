"""Detects hooks with which a model's own code changes gradients. A recording leaves out hooks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from exporters.programs import source_lines
from profiles.errors import ModelError


class GradientHooks(TorchFunctionMode):
    """Context for a forward pass. The hooks that the pass sets are watched in the backward pass."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`; of `register_hook`, watch the hook."""
        if func is Tensor.register_hook and len(args) == 2:
            args = args[0], watched(args[1], source_lines.running_line())
        return func(*args, **(kwargs or {}))


def watched(hook: Callable[[Tensor], Any], line: str) -> Callable[[Tensor], None]:
    """The `hook` that was set at `line`; it raises ModelError if it returns another gradient."""

    def watching(gradient: Tensor) -> None:
        changed = hook(gradient)
        if changed is not None and not changed.equal(gradient):
            raise ModelError(
                "A hook changes a gradient{place}, and a recording has no hooks. Leave the hook "
                "out, or write the computation so that it has this gradient. For example, the "
                "gradient of h * 0.1 + (h * 0.9).detach() is a tenth of the gradient of h.",
                code="model.gradient-hook",
                place=source_lines.parenthesized(line),
            )

    return watching
