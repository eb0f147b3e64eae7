"""Defines an operator for loops over time, so that a recurrence of any length is one node.

`edgetailor::loop` runs a named step along the first axis of its inputs. The step is a plain
function of tensors, written once. Here the step runs in a Python loop. Writers turn the step into
the body of their runtime's loop. `Step` lists the requirements for such a function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch import autograd_function
from torch.autograd.function import _SingleLevelFunction

Tensors = list[Tensor]
Results = tuple[Tensor, ...]
Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class Loop:
    """The arguments and results of one run of a loop.

    Attributes:
        states: First states. Each step replaces the states.
        inputs: Tensors (T, ...); each step reads one row of each.
        constants: Tensors that every step reads.
        results: Last states, then outputs (T, ...).
        reverse: Whether the loop runs from the last row to the first.
    """

    states: Tensors
    inputs: Tensors
    constants: Tensors
    results: Tensors
    reverse: bool


@dataclass(frozen=True)
class Step:
    """The step of a loop, and the loop's derivative.

    Attributes:
        states: Number of states.
        function: Takes (*states, *one row of each input, *constants) and returns (*new states,
            *outputs). Each result must be a separate new tensor, and not an argument.
        derivative: Takes a loop and the gradients of its results, which are None for results that
            nothing reads. Returns the gradients of states, inputs and constants, in this order.
            None means no gradient.
    """

    states: int
    function: Callable[..., Results]
    derivative: Callable[[Loop, Gradients], Gradients] | None = None


STEPS: dict[str, Step] = {}


def register(name: str, step: Step) -> str:
    """Register `step` under `name` and return `name`. Raises ValueError if `name` is taken."""
    if name in STEPS:
        raise ValueError(
            f"Loops called {name!r} run {STEPS[name].function.__qualname__}; "
            f"{step.function.__qualname__} needs another name."
        )
    STEPS[name] = step
    return name


LIBRARY: Any = torch.library.Library("edgetailor", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "loop(str step, Tensor[] states, Tensor[] inputs, Tensor[] constants, bool reverse) -> Tensor[]"
)
loop = torch.ops.edgetailor.loop.default


def run_loop(
    name: str, states: Tensors, inputs: Tensors, constants: Tensors, reverse: bool
) -> Tensors:
    """Run the step `name` for every row of `inputs`. With `reverse`, begin at the last row.

    In both directions, row t of an output is the result for row t of the inputs.
    """
    step, rows = STEPS[name], list(zip(*(x.unbind(0) for x in inputs), strict=True))
    outputs = []
    for row in reversed(rows) if reverse else rows:
        results = step.function(*states, *row, *constants)
        states = list(results[: step.states])
        outputs.append(results[step.states :])
    # A reversed loop computes the last row first.
    ordered = outputs[::-1] if reverse else outputs
    return [*states, *(torch.stack(column) for column in zip(*ordered, strict=True))]


def loop_shapes(
    name: str, states: Tensors, inputs: Tensors, constants: Tensors, reverse: bool
) -> Tensors:
    """Compute the shapes of the results of `run_loop`, as tensors without data.

    Only one step runs, because all steps have the same shapes.
    """
    step = STEPS[name]
    results = step.function(*states, *(x[0] for x in inputs), *constants)
    length = inputs[0].shape[0]
    outputs = [value.new_empty((length, *value.shape)) for value in results[step.states :]]
    return [*results[: step.states], *outputs]


class DifferentiableLoop(_SingleLevelFunction):
    """A loop whose gradient is computed by the `derivative` of its step.

    This class is needed because gradients that are registered with
    `torch.library.register_autograd` do not run under `torch.func`. `torch.func` nests levels of
    differentiation. Like PyTorch's built-in operators, this class handles one level, and calls the
    loop again for the levels below.
    """

    @staticmethod
    def forward(
        ctx: Any, keys: Any, name: str, reverse: bool, ends: tuple[int, int], *flat: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the loop on the tensors in `flat`.

        The states come before index `ends[0]`, then the inputs before `ends[1]`, then the
        constants.
        """
        # Pass None instead of zeros for unread results, so that `derivative` can skip them.
        ctx.set_materialize_grads(False)
        ctx.step, ctx.reverse, ctx.ends = STEPS[name], reverse, ends
        parts = split_arguments(flat, ends)
        with torch._C._AutoDispatchBelowAutograd():
            # Dispatch again below autograd, so that PyTorch does not look for a second gradient.
            below = keys & torch._C._after_autograd_keyset
            results = loop.redispatch(below, name, *parts, reverse)
        ctx.save_for_backward(*flat, *results)
        ctx.read = len(flat)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return None for each argument before `flat`, then the gradients of `flat`."""
        saved = list(ctx.saved_tensors)
        parts = split_arguments(saved[: ctx.read], ctx.ends)
        finished = Loop(*parts, results=saved[ctx.read :], reverse=ctx.reverse)
        return None, None, None, None, *ctx.step.derivative(finished, gradients)


def split_arguments(
    flat: Sequence[Tensor], ends: tuple[int, int]
) -> tuple[Tensors, Tensors, Tensors]:
    """Split `flat` at the two indices in `ends`: into states, inputs and constants."""
    first, second = ends
    return list(flat[:first]), list(flat[first:second]), list(flat[second:])


def run_differentiable_loop(
    keys: Any, name: str, states: Tensors, inputs: Tensors, constants: Tensors, reverse: bool
) -> Tensors:
    """Run a loop so that autograd can differentiate it."""
    ends = len(states), len(states) + len(inputs)
    one_level: Any = autograd_function
    with one_level.enable_single_level_autograd_function():
        apply = cast(Any, DifferentiableLoop).apply
        return list(apply(keys, name, reverse, ends, *states, *inputs, *constants))


LIBRARY.impl("loop", run_loop, "CompositeExplicitAutograd")
LIBRARY.impl("loop", run_differentiable_loop, "Autograd", with_keyset=True)
torch.library.register_fake("edgetailor::loop", loop_shapes, lib=LIBRARY)
