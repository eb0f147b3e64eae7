"""Loops over time as one operator, so that a recurrence stays one node however many steps it goes.

`edgetailor::loop` runs a named step along the first axis of its inputs. The step is a plain
function of tensors, written once: here it runs in a Python loop, a writer makes the body of its
runtime's own loop of it. What a step must be for that is said at `Step`.
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
    """One run of a loop: what it began with, what it read, and its results.

    `states` change from step to step, `inputs` (T, ...) are read one row a step, `constants` stay
    the same. `results` are the last states, then the outputs (T, ...).
    """

    states: Tensors
    inputs: Tensors
    constants: Tensors
    results: Tensors
    reverse: bool


@dataclass(frozen=True)
class Step:
    """`function` takes (*states, *one step of each input, *constants) and returns (*new states,
    *outputs), none of which is one of its arguments or another result.

    `derivative` takes a loop and the gradients of its results, None for those that nothing reads,
    and returns the gradients of states, inputs and constants, in order, None where there is none.
    """

    states: int
    function: Callable[..., Results]
    derivative: Callable[[Loop, Gradients], Gradients] | None = None


STEPS: dict[str, Step] = {}


def register(name: str, step: Step) -> str:
    """Let loops of `name` run `step`, and return `name`.

    Raises ValueError where there are such loops already.
    """
    if name in STEPS:
        raise ValueError(
            f"Loops of {name!r} run {STEPS[name].function.__qualname__}; "
            f"{step.function.__qualname__} needs another name."
        )
    STEPS[name] = step
    return name


LIBRARY: Any = torch.library.Library("edgetailor", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "loop(str step, Tensor[] states, Tensor[] inputs, Tensor[] constants, bool reverse) -> Tensor[]"
)
loop = torch.ops.edgetailor.loop.default


def run(name: str, states: Tensors, inputs: Tensors, constants: Tensors, reverse: bool) -> Tensors:
    """The step `name` from the first row of `inputs` to the last, or from the last to the first.

    Row t of an output is what step t returned, in both directions.
    """
    step, rows = STEPS[name], list(zip(*(x.unbind(0) for x in inputs), strict=True))
    outputs = []
    for row in reversed(rows) if reverse else rows:
        results = step.function(*states, *row, *constants)
        states = list(results[: step.states])
        outputs.append(results[step.states :])
    ordered = outputs[::-1] if reverse else outputs
    return [*states, *(torch.stack(column) for column in zip(*ordered, strict=True))]


def shapes(
    name: str, states: Tensors, inputs: Tensors, constants: Tensors, reverse: bool
) -> Tensors:
    """What `run` returns, of tensors without data: one step tells."""
    step = STEPS[name]
    results = step.function(*states, *(x[0] for x in inputs), *constants)
    length = inputs[0].shape[0]
    outputs = [value.new_empty((length, *value.shape)) for value in results[step.states :]]
    return [*results[: step.states], *outputs]


class Differentiable(_SingleLevelFunction):
    """A loop whose gradient is its step's `derivative`.

    PyTorch's own registration of gradients refuses to run under `torch.func`; this is what its
    operators do: one level of differentiation, with the levels below left to the dispatcher.
    """

    @staticmethod
    def forward(
        ctx: Any, keys: Any, name: str, reverse: bool, ends: tuple[int, int], *flat: Tensor
    ) -> tuple[Tensor, ...]:
        """`flat`: states up to `ends[0]`, inputs up to `ends[1]`, then constants."""
        ctx.set_materialize_grads(False)
        ctx.step, ctx.reverse, ctx.ends = STEPS[name], reverse, ends
        parts = apart(flat, ends)
        with torch._C._AutoDispatchBelowAutograd():
            below = keys & torch._C._after_autograd_keyset
            results = loop.redispatch(below, name, *parts, reverse)
        ctx.save_for_backward(*flat, *results)
        ctx.read = len(flat)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Gradients of `flat`; there is none of what comes ahead of it."""
        saved = list(ctx.saved_tensors)
        parts = apart(saved[: ctx.read], ctx.ends)
        ran = Loop(*parts, results=saved[ctx.read :], reverse=ctx.reverse)
        return None, None, None, None, *ctx.step.derivative(ran, gradients)


def apart(flat: Sequence[Tensor], ends: tuple[int, int]) -> tuple[Tensors, Tensors, Tensors]:
    """States, inputs and constants."""
    first, second = ends
    return list(flat[:first]), list(flat[first:second]), list(flat[second:])


def differentiable(
    keys: Any, name: str, states: Tensors, inputs: Tensors, constants: Tensors, reverse: bool
) -> Tensors:
    """`loop` where gradients may be asked for."""
    ends = len(states), len(states) + len(inputs)
    one_level: Any = autograd_function
    with one_level.enable_single_level_autograd_function():
        apply = cast(Any, Differentiable).apply
        return list(apply(keys, name, reverse, ends, *states, *inputs, *constants))


LIBRARY.impl("loop", run, "CompositeExplicitAutograd")
LIBRARY.impl("loop", differentiable, "Autograd", with_keyset=True)
torch.library.register_fake("edgetailor::loop", shapes, lib=LIBRARY)
