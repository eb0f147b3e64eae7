"""Compares the recording of the user's own loss with the function itself."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from device_agent.formats.packing import columns
from exporters.objectives.own_loss import Reduced, load_loss, place_of
from exporters.objectives.own_loss_labels import zeros_last
from exporters.programs import source_lines
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.output_parts import described_parts, part_of, random_labels
from exporters.programs.training.losses import Objective
from exporters.recording.model_output import OutputForm
from exporters.recording.replacements.replaced_functions import as_on_devices
from profiles.errors import ModelError
from profiles.text_formatting import said_by

TOLERANCE = 1e-4
"""Largest difference between a loss and its recording, relative to the result. Both run in float32,
so only rounding errors may differ."""
WIDE = 64
"""If a loss has no gradient for a few outputs of the model, it is tried on this many samples."""


def check_own_loss(goal: Objective, reference: str, outputs: OutputForm, output: Tensor) -> None:
    """Compare the recorded loss with the function itself, on outputs of the model.

    Args:
        goal: The objective of the loss.
        reference: `module:function`.
        outputs: The outputs of the model.
        output: The packed result of the model for random samples.

    Raises:
        ModelError: The loss or its gradient is not finite, the loss does not depend on the outputs,
            or the recording differs.
    """
    function = load_loss(reference)
    for with_ends in (True, False):
        results = results_of(goal, reference, outputs, output, with_ends=with_ends)
        (value, gradient), (recorded, own) = results
        if is_finite(value, gradient):
            break
    if not is_finite(value, gradient):
        raise ModelError(
            "The loss {loss!r}{place} is {value:g} for the model's outputs and random labels "
            "(numbers from 0 to 1). It or its gradient is not finite. Avoid log(0) and divisions "
            "by 0, for example with clamp or logsigmoid.",
            code="loss.not-finite",
            loss=reference,
            place=place_of(function),
            value=float(value),
        )
    if gradient is None or own is None or not (gradient.any() or trains(goal, output, outputs)):
        raise ModelError(
            "The loss {loss!r}{place} has no gradient. It does not depend on the model's outputs, "
            "or depends on them only through integers, `detach` or `torch.no_grad`. Compute it "
            "from the outputs with operators that have a gradient.",
            code="loss.no-gradient",
            loss=reference,
            place=place_of(function),
        )
    far = abs(float(recorded - value)) > TOLERANCE * (abs(float(value)) + 1e-6)
    if far or float((own - gradient).norm()) > TOLERANCE * float(gradient.norm()) + 1e-6:
        raise ModelError(
            "The recorded loss {loss!r}{place} differs from the function itself. Values that "
            "change between calls cannot be exported. A torch.autograd.Function can be exported "
            "only if it works on each element separately, or returns the loss.",
            code="loss.recording-differs",
            loss=reference,
            place=place_of(function),
        )


def is_finite(value: Tensor, gradient: Tensor | None) -> bool:
    """Whether a loss and its gradient, if it has one, are finite."""
    return bool(value.isfinite()) and (gradient is None or bool(gradient.isfinite().all()))


def results_of(
    goal: Objective, reference: str, outputs: OutputForm, output: Tensor, *, with_ends: bool
) -> list[tuple[Tensor, Tensor | None]]:
    """The value and the gradient of the function, and the value and the gradient of its recording.

    `check_own_loss` describes the arguments and errors, and `random_labels` describes `with_ends`.
    """
    function, parts = load_loss(reference), goal.labels.parts
    generator = torch.Generator().manual_seed(0)
    labels = random_labels(parts, len(output), generator, with_ends=with_ends)
    module = Reduced(function, reference, outputs, str)
    if calls_ctc(lambda: module(output.detach().clone(), labels)):
        labels = zeros_last(labels, parts)
    results = []
    for run in (lambda o: module(o, labels)[0], lambda o: goal.loss(o, labels)):
        leaf = output.detach().clone().requires_grad_()
        try:
            with as_on_devices():
                value = run(leaf.clone())  # a loss may write into it
                gradient = torch.autograd.grad(value, leaf)[0] if value.requires_grad else None
        except Exception as error:  # the user's code may raise anything
            raise_if_interrupted(error)
            raise ModelError(
                "The loss {loss!r} or its gradient fails for the labels that it declares: "
                "{reason}{place}. Declare the labels that fit the outputs: {outputs}.",
                code="loss.fails",
                loss=reference,
                reason=said_by(error),
                place=source_lines.place_of_error(error) or place_of(function),
                outputs=described_parts(outputs.parts),
            ) from error
        results.append((value.detach(), gradient))
    return results


class CtcCalls(TorchFunctionMode):
    """A context that records whether code calls `ctc_loss`."""

    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`."""
        self.found |= func is functional.ctc_loss
        return func(*args, **(kwargs or {}))


def calls_ctc(run: Callable[[], object]) -> bool:
    """Whether `run` calls `ctc_loss`. Errors of `run` are ignored: the check reports them."""
    calls = CtcCalls()
    with suppress(Exception), as_on_devices(), calls:
        run()
    return calls.found


def trains(goal: Objective, output: Tensor, outputs: OutputForm) -> bool:
    """Whether the loss of `goal` has a gradient for some random outputs in the shape of `output`.

    A loss without a gradient for `output` may have a gradient elsewhere. Examples are a hinge loss,
    and a loss of sequences that are all too short. So integers, such as lengths, are drawn up to
    the largest size of an output.
    """
    generator, parts = torch.Generator().manual_seed(0), outputs.parts
    others = torch.randn(WIDE, *output.shape[1:], generator=generator)
    most = max((size for part in parts for size in part.shape), default=1)
    for part in parts:
        if part.name in outputs.integers:
            own = others[:, columns(parts)[part.name]] if len(parts) > 1 else others
            own.copy_(torch.randint(most + 1, own.shape, generator=generator))
    labels = random_labels(goal.labels.parts, WIDE, generator)
    value = goal.loss(others.requires_grad_(), labels)
    return bool(torch.autograd.grad(value, others)[0].any())


def used_outputs(
    goal: Objective, reference: str, outputs: OutputForm, output: Tensor
) -> frozenset[int] | None:
    """Indices of the outputs with a gradient of the user's own loss. None for a single output.

    For all other outputs, PyTorch's gradient is None, so PyTorch's optimizers do not decay the
    parameters of these outputs. The arguments are those of `check_own_loss` and must have passed
    this check.
    """
    parts = outputs.parts
    if len(parts) == 1:
        return None
    labels = random_labels(goal.labels.parts, len(output), torch.Generator().manual_seed(0))
    leaves = [part_of(output, part, parts).detach().requires_grad_() for part in parts]
    function = Reduced(load_loss(reference), reference, outputs, str)
    # Clones, because a loss may write into them.
    given = {
        part.name: outputs.restored(part.name, leaf.clone())
        for part, leaf in zip(parts, leaves, strict=True)
    }
    with as_on_devices():
        returned: Any = function.returned(given, labels)
    value = returned[0] if isinstance(returned, tuple) else returned
    gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    return frozenset(number for number, found in enumerate(gradients) if found is not None)
