"""`depth`: the first blocks of every stage, and all layers outside of the stages (InclusiveFL).

A stage is a sequence of blocks of one class in an `nn.Sequential` or `nn.ModuleList`, such as
residual blocks or the layers of a transformer. The output of a block has the shape of its input;
only the first block of a stage may change the shape. The submodel leaves out the last blocks of
each stage. So a device with a small ratio trains a subset of the blocks that a device with a larger
ratio trains. Each block is averaged over the devices that have it.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from exporters.programs.tracing import DTYPES
from exporters.recording.captured import Captured
from profiles.errors import SpecError
from toolkit.families import forms
from toolkit.submodels.family import Family
from toolkit.submodels.one_step_submodel import rewritten_submodel
from toolkit.submodels.rewritten_model import Rewritten
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import LayerDecision, SplitRequest, Submodel

CONTAINERS = (nn.Sequential, nn.ModuleList)

Stage = dict[str, bool]
"""The names of the blocks of a stage, in order, and whether they return a tuple."""


class LeftOut(nn.Module):
    """Takes the place of a block and returns its input, in a tuple if the block returns one."""

    def __init__(self, in_tuple: bool) -> None:
        super().__init__()
        self.in_tuple = in_tuple

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor]:
        """Return `x`; masks and other arguments of the block are not used."""
        return (x,) if self.in_tuple else x


class Depth(Family):
    """The family `depth`; see the module."""

    form = forms.DEPTH

    def split(self, request: SplitRequest) -> Submodel:
        """See Family."""
        # Use the decimal's exact value: with binary numbers, 0.07 * 100 is above 7.
        ratio = Fraction(str(forms.DEPTH.size_as_number(request.spec)))
        shallow = copy.deepcopy(request.model)
        stages = list(stages_of(request.model, request.capture()))
        decisions = []
        for stage in stages:
            count = math.ceil(ratio * len(stage))
            for number, (name, in_tuple) in enumerate(stage.items()):
                decisions.append(LayerDecision(name, "dense" if number < count else "left out"))
                if number >= count:
                    shallow.set_submodule(name, LeftOut(in_tuple))
        check_smaller(stages, ratio, request.spec)
        rewritten = Rewritten(shallow, layer_decisions=tuple(decisions))
        return rewritten_submodel(request, rewritten)


def check_smaller(stages: list[Stage], ratio: Fraction, spec: Spec) -> None:
    """Raise SpecError if `ratio` is below 1 but leaves out no block."""
    longest = max(map(len, stages), default=1)
    if ratio == 1 or math.ceil(ratio * longest) < longest:
        return
    if longest == 1:
        raise SpecError(
            "{spec!r}: no block can be left out. Blocks of one class must follow each other in an "
            "nn.Sequential or nn.ModuleList and return tensors of the shape that they take. Use "
            "another family.",
            code="spec.nothing-smaller",
            spec=str(spec),
        )
    highest = math.floor(1e4 * (longest - 1) / longest) / 1e4
    raise SpecError(
        "{spec!r}: with this ratio, every stage would keep all its blocks. Use {highest_ratio} or "
        "less. For the whole model, use 1.",
        code="spec.nothing-smaller",
        spec=str(spec),
        highest_ratio=highest,
    )


def stages_of(model: nn.Module, captured: Captured) -> Iterator[Stage]:
    """Yield the stages that have more than one block. A stage inside a block is not found."""
    calls, blocks = calls_of(model, captured), set[str]()
    for path, container in model.named_modules():
        if not isinstance(container, CONTAINERS):
            continue
        if any(path.startswith(f"{block}.") for block in blocks):
            continue
        for kind, run in groupby(container.named_children(), lambda child: type(child[1])):
            names = [f"{path}.{own}" if path else own for own, _ in run]
            stages = [stage for stage in divided(names, calls, model) if len(stage) > 1]
            # A sequence of containers may be a sequence of stages, with the blocks inside.
            if stages or (len(names) > 1 and not issubclass(kind, CONTAINERS)):
                blocks.update(names)
            yield from stages


def divided(names: Sequence[str], calls: Mapping[str, "Call"], model: nn.Module) -> Iterator[Stage]:
    """Divide the blocks `names`, which follow each other, into stages.

    A block whose output has the shape of its input belongs to the stage of the block before it. Any
    other block begins a new stage.
    """
    stage: Stage = {}
    for name in names:
        call = calls.get(name) if owns_tensors(name, model) else None
        if call is None or call.before != call.after:
            yield stage
            stage = {}
        if call is not None:
            stage[name] = call.in_tuple
    yield stage


class Call(NamedTuple):
    """A call of a module: shapes of its input and its result, and whether the result is a tuple."""

    before: torch.Size
    after: torch.Size
    in_tuple: bool


def calls_of(model: nn.Module, captured: Captured) -> dict[str, Call]:
    """Calls of modules that are called once, take a tensor first, and return one tensor."""
    model, records = copy.deepcopy(model).eval(), dict[str, list[Call | None]]()

    def note(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_: nn.Module, given: tuple[Any, ...], result: Any) -> None:
            in_tuple = isinstance(result, tuple) and len(result) == 1
            after = result[0] if in_tuple else result
            usable = given and isinstance(given[0], Tensor) and isinstance(after, Tensor)
            call = Call(given[0].shape, after.shape, in_tuple) if usable else None
            records.setdefault(name, []).append(call)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    dtype = DTYPES[captured.sample_dtype]
    # Without torch.no_grad(): the model's code may compute gradients.
    model(torch.zeros(2, *captured.sample_shape, dtype=dtype))
    return {n: calls[0] for n, calls in records.items() if len(calls) == 1 and calls[0] is not None}


def owns_tensors(name: str, model: nn.Module) -> bool:
    """Whether the module `name` has parameters and shares none of them with other modules."""
    inside, outside = set[int](), set[int]()
    for path, tensor in model.named_parameters(remove_duplicate=False):
        (inside if path.startswith(f"{name}.") else outside).add(id(tensor))
    return bool(inside) and inside.isdisjoint(outside)


FAMILY = Depth()
