"""The user's own loss: imported, recorded as a graph, and compared with the function itself."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from device_agent.formats.atomic_files import shown
from device_agent.formats.manifest import ABSOLUTE, CORRECT, LOSS, Part
from device_agent.formats.packing import packed_size
from exporters.objectives.labels import ATTRIBUTE, rule_of_parts
from exporters.programs import source_lines
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.losses import Measure, Objective
from exporters.programs.output_parts import (
    described_parts,
    nest,
    part_of,
    random_labels,
    unpack,
)
from exporters.programs.recorded_graph import MINIMUM_BATCH
from exporters.recording.graph_cleanup import clean_up
from exporters.recording.model_checks import check_draws_nothing, check_operators, check_sizes
from exporters.recording.model_output import OutputForm
from exporters.recording.replacements.replaced_functions import as_on_devices
from exporters.recording.torch_export import exported
from profiles.errors import ModelError
from profiles.text_formatting import did_you_mean, said_by

Loss = Callable[[Any, Any], object]
TOLERANCE = 1e-4
"""Largest difference between a loss and its recording, relative to the result. Both run in float32,
so only rounding errors may differ."""
WIDE = 64
"""If a loss has no gradient for a few outputs of the model, it is tried on this many samples."""
RETURNS = (
    "It must return the loss of each sample (batch,), one number for the batch, or a pair of one "
    "of these and a dictionary of metrics (batch,)"
)


def load_loss(reference: str) -> Loss:
    """Import the user's loss. The current folder is importable.

    Args:
        reference: `module:function`.

    Raises:
        ModelError: There is no such function, or the function does not declare its labels.
    """
    module_name, _, name = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ModelError(
            "The loss {loss!r} cannot be imported: {reason}{place}. Write module:function; modules "
            "are looked for in the current folder and among the installed packages.",
            code="loss.cannot-import",
            loss=reference,
            reason=said_by(error),
            place=source_lines.place_of_error(error),
        ) from None
    function: Loss | None = getattr(module, name, None)
    if not callable(function):
        names = [other for other in dir(module) if callable(getattr(module, other, None))]
        raise ModelError(
            "The module {module} has no function {function!r}{did_you_mean}",
            code="loss.unknown-function",
            loss=reference,
            module=module_name,
            function=name,
            did_you_mean=did_you_mean(name, names),
        )
    if not getattr(function, ATTRIBUTE, ()):
        raise ModelError(
            "The loss {loss!r}{place} does not say which labels it takes. Put a decorator above "
            "it: @et.loss(et.classes(10)) for one array, or @et.loss(box=et.numbers(4), "
            "kind=et.classes(10)) for several.",
            code="loss.no-labels",
            loss=reference,
            place=place_of(function),
        )
    return function


def own_objective(reference: str, outputs: OutputForm) -> Objective:
    """The objective of the user's own loss for a model with these outputs.

    Raises:
        ModelError: The loss cannot be imported or recorded, or an output cannot be passed to it.
    """
    function = load_loss(reference)
    if outputs.in_training:
        raise ModelError(
            "The loss {loss!r} gets everything that the model returns, but the model returns "
            "further outputs only in training: {outputs}. Return the same outputs in both modes, "
            "without `if self.training`, because the loss also evaluates the model.",
            code="loss.outputs-by-mode",
            loss=reference,
            outputs=", ".join(outputs.left_out),
        )
    if outputs.left_out:
        name, reason = next(iter(outputs.left_out.items()))
        raise ModelError(
            "The loss {loss!r} gets everything that the model returns, but {output!r} cannot be "
            "passed to it: {reason}. Return only tensors (batch, ...) of float32.",
            code="loss.unusable-output",
            loss=reference,
            output=name,
            reason=reason,
        )
    return _recorded_objective(function, reference, outputs.parts)


@lru_cache(maxsize=64)
def _recorded_objective(function: Loss, reference: str, outputs: tuple[Part, ...]) -> Objective:
    """Record `function` once for these outputs, because every kind of device needs it."""
    labels: tuple[Part, ...] = getattr(function, ATTRIBUTE)
    graph, names = record_loss(function, reference, outputs)

    def result(number: int) -> Measure:
        def measure(output: Tensor, packed: Tensor) -> Tensor:
            found: Tensor = graph(output, packed)[number]
            return found

        return measure

    measures = {name: result(number) for number, name in enumerate(names)}
    return Objective(
        measures.pop(LOSS),
        rule_of_parts(labels),
        metrics=measures,
        outputs=outputs if len(outputs) > 1 else (),
        own=True,
        together=graph,
    )


class Reduced(nn.Module):
    """The user's loss as a model of two inputs: the packed outputs and the packed labels.

    `report` is called with the names of the results: the loss and the metrics. An attribute cannot
    keep these names, because recording resets attributes.
    """

    def __init__(
        self,
        function: Loss,
        reference: str,
        outputs: Sequence[Part],
        report: Callable[[list[str]], object],
    ) -> None:
        super().__init__()
        self.function, self.reference, self.outputs = function, reference, outputs
        self.report = report

    def forward(self, output: Tensor, packed: Tensor) -> tuple[Tensor, ...]:
        """The mean loss of the batch, and the means of the metrics."""
        labels = unpack(packed, getattr(self.function, ATTRIBUTE))
        returned = self.function(as_returned(output, self.outputs), labels)
        value: object = returned
        metrics: Any = {}
        if isinstance(returned, tuple) and len(returned) == 2:
            value, metrics = returned
        if not isinstance(metrics, Mapping):
            raise self._wrong(f"the second of the pair is a {type(metrics).__name__}")
        for name in metrics:
            if not str(name).isidentifier() or name in (LOSS, CORRECT, ABSOLUTE):
                raise self._wrong(
                    f"{name!r} is no name for a metric, which is a word such as iou, but not "
                    f"{LOSS}, {CORRECT} or {ABSOLUTE}"
                )
        # If the function reads no labels, nothing says yet that both batches have the same size.
        batch = {str(packed.shape[0]), str(output.shape[0])}
        results = [self._mean(value, "the loss", batch, scalar=True)]
        results += [
            self._mean(metric, f"the metric {name!r}", batch, scalar=False)
            for name, metric in metrics.items()
        ]
        self.report([LOSS, *metrics])
        return tuple(results)

    def _mean(self, value: object, what: str, batch: Set[str], *, scalar: bool) -> Tensor:
        if not isinstance(value, Tensor):
            raise self._wrong(f"{what} is a {type(value).__name__}")
        if scalar and value.dim() == 0:
            return value
        if value.dim() != 1 or str(value.shape[0]) not in batch:
            sizes = ["batch" if str(n) in batch else str(n) for n in value.shape]
            raise self._wrong(f"{what} has the shape ({', '.join(sizes)})")
        return value.to(torch.float32).mean() if not value.is_floating_point() else value.mean()

    def _wrong(self, problem: str) -> ModelError:
        return ModelError(
            "The loss {loss!r}{place} returns something else than a loss: {problem}. {returns}.",
            code="loss.wrong-result",
            loss=self.reference,
            place=place_of(self.function),
            problem=problem,
            returns=RETURNS,
        )


def record_loss(
    function: Loss, reference: str, outputs: Sequence[Part]
) -> tuple[GraphModule, list[str]]:
    """Record the user's loss as a graph of (packed outputs, packed labels).

    Returns:
        The graph, and the names of its results.

    Raises:
        ModelError: The loss cannot be recorded, or does not return a loss.
    """
    labels: tuple[Part, ...] = getattr(function, ATTRIBUTE)
    names: list[list[str]] = []
    module = Reduced(function, reference, outputs, names.append)
    shape = (packed_size(outputs),) if len(outputs) > 1 else outputs[0].shape
    rows = MINIMUM_BATCH + 1
    example = torch.rand(rows, *shape), torch.zeros(rows, packed_size(labels))
    try:
        graph = exported(module, (), *example)
        clean_up(graph)
        check_sizes(graph)
        check_operators(graph)
        check_draws_nothing(graph)
    except ModelError as error:
        raise of_loss(error, function, reference) from error
    except Exception as error:  # the user's code may raise anything
        raise_if_interrupted(error)
        raise ModelError(
            "The loss {loss!r} cannot be recorded{place}: {reason}. It gets {outputs} and the "
            "labels {labels}. It must compute with torch's operators and run the same for every "
            "batch: choose with torch.where, and do not read values.",
            code="loss.cannot-record",
            loss=reference,
            place=source_lines.place_of_error(error) or place_of(function),
            reason=said_by(error),
            outputs=described_parts(outputs) if outputs[0].name else "the output",
            labels=described_parts(labels).strip(),
        ) from error
    return graph, names[-1]


def as_returned(output: Tensor, outputs: Sequence[Part]) -> Any:
    """Turn one packed tensor into the `outputs`, in the form in which the model returns them."""
    if len(outputs) > 1:
        return unpack(output, outputs)
    name = outputs[0].name
    return nest({name: output}) if name else output


def of_loss(error: ModelError, function: Loss, reference: str) -> ModelError:
    """Convert an `error` about a model, raised for a loss, to an error about the loss."""
    if error.code.startswith("loss."):
        return error
    if error.code == "model.random-numbers":
        line = str(error.values.get("line", "")).removeprefix(", ")
        return ModelError(
            "The loss {loss!r} draws random numbers{place}. It must return the same for the same "
            "outputs and labels, because evaluations compare models by this loss. Draw random "
            "numbers in the model, under `if self.training`, or leave them out.",
            code="loss.random-numbers",
            loss=reference,
            place=source_lines.parenthesized(line) or place_of(function),
        )
    reason = str(error).replace("The model's ", "its ", 1).replace("The model ", "it ", 1)
    return ModelError(
        "The loss {loss!r}{place} cannot be recorded: {reason}",
        code="loss.cannot-record",
        loss=reference,
        place="" if error.values.get("place") else place_of(function),
        reason=reason[0].lower() + reason[1:],
    )


def check_own_loss(goal: Objective, reference: str, outputs: OutputForm, output: Tensor) -> None:
    """Compare the recorded loss with the function itself, on outputs of the model.

    Args:
        goal: The objective of the loss.
        reference: `module:function`.
        outputs: The outputs of the model.
        output: What the model computes for random samples, packed.

    Raises:
        ModelError: The loss or its gradient is not finite, the loss does not depend on the outputs,
            or the recording differs.
    """
    function = load_loss(reference)
    parts = goal.labels.parts
    labels = random_labels(parts, len(output), torch.Generator().manual_seed(0))
    module = Reduced(function, reference, outputs.parts, str)
    results = []
    for run in (lambda o: module(o, labels)[0], lambda o: goal.loss(o, labels)):
        leaf = output.detach().clone().requires_grad_()
        try:
            with as_on_devices():
                value = run(leaf)
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
    (value, gradient), (recorded, own) = results
    if not torch.isfinite(value) or not (gradient is None or torch.isfinite(gradient).all()):
        raise ModelError(
            "The loss {loss!r}{place} is not finite for outputs of the model and labels from 0 to "
            "1: {value:g}. Avoid logarithms and divisions of 0, for example with clamp or "
            "logsigmoid.",
            code="loss.not-finite",
            loss=reference,
            place=place_of(function),
            value=float(value),
        )
    if gradient is None or own is None or not (gradient.any() or trains(goal.loss, output, parts)):
        raise ModelError(
            "The loss {loss!r}{place} has no gradient: it does not depend on the model's outputs, "
            "or only through integers, `detach` or `torch.no_grad`. Compute it from the outputs "
            "with operators that have a gradient.",
            code="loss.no-gradient",
            loss=reference,
            place=place_of(function),
        )
    far = abs(float(recorded - value)) > TOLERANCE * (abs(float(value)) + 1e-6)
    if far or float((own - gradient).norm()) > TOLERANCE * float(gradient.norm()) + 1e-6:
        raise ModelError(
            "The recorded loss {loss!r}{place} differs from the function itself. A custom "
            "autograd.Function and values that change between calls cannot be exported.",
            code="loss.recording-differs",
            loss=reference,
            place=place_of(function),
        )


def trains(loss: Measure, output: Tensor, labels: Sequence[Part]) -> bool:
    """Whether `loss` has a gradient for some random outputs in the shape of `output`.

    A loss without a gradient for `output` may have a gradient elsewhere. An example is a hinge
    loss.
    """
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(WIDE, *output.shape[1:], generator=generator).requires_grad_()
    value = loss(others, random_labels(labels, WIDE, generator))
    return bool(torch.autograd.grad(value, others)[0].any())


def used_outputs(
    goal: Objective, reference: str, outputs: OutputForm, output: Tensor
) -> frozenset[int] | None:
    """Indices of the outputs that a gradient of the user's own loss reaches; None for one output.

    For all other outputs, PyTorch's gradient is None. So PyTorch's optimizers do not decay the
    parameters of these outputs. The arguments are those of `check_own_loss`, which has accepted
    them.
    """
    parts = outputs.parts
    if len(parts) == 1:
        return None
    labels = random_labels(goal.labels.parts, len(output), torch.Generator().manual_seed(0))
    leaves = [part_of(output, part, parts).detach().requires_grad_() for part in parts]
    given = nest({part.name: leaf for part, leaf in zip(parts, leaves, strict=True)})
    with as_on_devices():
        returned: Any = load_loss(reference)(given, unpack(labels, goal.labels.parts))
    value = returned[0] if isinstance(returned, tuple) else returned
    gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
    return frozenset(number for number, found in enumerate(gradients) if found is not None)


def place_of(function: object) -> str:
    """The user's file and line of `function`, as ` (losses.py, line 3)`; or empty."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f" ({shown(Path(code.co_filename))}, line {code.co_firstlineno})"
