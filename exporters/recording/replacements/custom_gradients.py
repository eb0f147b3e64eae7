"""Records the gradients of a model's own `torch.autograd.Function`s, if a graph can express them.

Recording follows operators. Recording sees only the `forward` of such a function, and would derive
another gradient from `forward`. Here y = forward(x) becomes constant(y) + (x - constant(x)) * s,
with s = backward(1). The value is the same, and the gradient of x is s times that of y. This is the
function's own gradient if each element of y depends only on the same element of x. Examples are
straight-through estimators, surrogates of spikes and reversed gradients. A loss y has fewer axes
than x: then the products are summed over the other axes of x. For other functions, the comparison
with the model reports an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from exporters.programs import source_lines
from exporters.recording.replacements.packed_sequences import code_of
from profiles.errors import ModelError

_CALLS: ContextVar[list[str] | None] = ContextVar("calls of functions with gradients", default=None)
APPLY: Any = Function.apply.__func__  # type: ignore[attr-defined]
apply = FunctionType(
    APPLY.__code__, APPLY.__globals__, "apply", APPLY.__defaults__, APPLY.__closure__
)
"""PyTorch's own method."""


class Context:
    """Stores the tensors that `forward` saves for `backward`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep `tensors`."""
        self.saved_tensors = tensors

    def ignore(self, *_: Any) -> None:
        """Do nothing, because PyTorch needs this method only for speed."""

    mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_forward = ignore


class Replacing(Function):
    """Holds the code that replaces the code of `Function.apply`.

    Python requires that both code objects read the variable `__class__`.
    """

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Call the function with its own gradient."""
        from exporters.recording.replacements.custom_gradients import with_own_gradient

        _ = __class__  # type: ignore[name-defined]
        return with_own_gradient(cls, *args, **kwargs)


def with_own_gradient(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of the function `kind`, with its own gradient if this gradient is elementwise."""
    calls = _CALLS.get()
    if calls is None:  # another thread calls the function while a model is recorded
        return apply(kind, *args, **kwargs)
    calls.append(source_lines.running_line())
    inputs = [a.detach() if isinstance(a, Tensor) else a for a in args]
    context = Context(tuple(isinstance(a, Tensor) and a.is_floating_point() for a in args))
    if kind.setup_context is Function.setup_context:
        y = kind.forward(context, *inputs, **kwargs)
    else:
        y = kind.forward(*inputs, **kwargs)
        kind.setup_context(context, tuple(inputs), y)
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return apply(kind, *args, **kwargs)
    slopes = kind.backward(context, torch.ones_like(y))
    slopes = slopes if isinstance(slopes, tuple) else (slopes,)
    for x, constant, slope in zip(args, inputs, slopes, strict=False):
        if isinstance(slope, Tensor):
            if x.shape[: y.dim()] != y.shape:
                return apply(kind, *args, **kwargs)
            change = (x - constant) * slope
            y = y + (change.sum([*range(y.dim(), x.dim())]) if x.dim() > y.dim() else change)
    return y


@contextmanager
def own_gradients() -> Iterator[list[str]]:
    """Context in which functions are recorded with their own gradients.

    Yields a list. Each call of such a function appends the user's line of the call.
    """
    calls: list[str] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


@contextmanager
def recorded_functions() -> Iterator[None]:
    """Context of a recording, which replaces functions if it is inside of `own_gradients`."""
    if _CALLS.get() is None:
        yield
        return
    with code_of(APPLY, Replacing.apply.__func__):  # type: ignore[attr-defined]
        yield


def has_own_functions(output: Tensor) -> bool:
    """Whether `output` is computed by a `torch.autograd.Function` of the model."""
    ahead, seen = [output.grad_fn], set[object]()
    while ahead:
        node = ahead.pop()
        if isinstance(node, BackwardCFunction):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
    return False


def custom_gradient(line: str) -> ModelError:
    """The error for a function, called at `line`, whose gradient a graph cannot express."""
    return ModelError(
        "The model calls a torch.autograd.Function{place} whose backward pass is not the gradient "
        "of its forward pass. Such a gradient can be exported only if the function works on each "
        "element separately. Otherwise write a function with the wanted gradient, smooth(x), as "
        "plain operators, and add the difference to the exact values without a gradient: "
        "y = smooth(x) + (exact(x) - smooth(x)).detach().",
        code="model.custom-gradient",
        place=source_lines.parenthesized(line),
    )
