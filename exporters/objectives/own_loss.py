"""The user's own loss: imported, and recorded as a graph."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from device_agent.formats.atomic_files import shown
from device_agent.formats.manifest import ABSOLUTE, CORRECT, LOSS, Part
from device_agent.formats.packing import in_files, packed_size
from exporters.objectives.own_loss_labels import ATTRIBUTE, rule_of_parts
from exporters.programs import source_lines
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.output_parts import (
    Named,
    described_parts,
    nest,
    unpack,
)
from exporters.programs.recorded_graph import MINIMUM_BATCH
from exporters.programs.training.losses import Measure, Objective
from exporters.recording.graph_checks import check_draws_nothing, check_operators, check_sizes
from exporters.recording.graph_cleanup import clean_up
from exporters.recording.model_output import NONE, OutputForm
from exporters.recording.replacements.custom_gradients import own_gradients
from exporters.recording.torch_export import exported
from profiles.errors import ModelError
from profiles.text_formatting import did_you_mean, said_by

Loss = Callable[[Any, Any], object]
TAKEN = (LOSS, CORRECT, ABSOLUTE)
"""Names that evaluations give to other numbers. A metric of the user gets `own_` before it."""
RETURNS = (
    "It must return the loss of each sample (batch,), or one number for the batch. For metrics, it "
    "must return a pair: such a loss, and a dictionary of metrics (batch,)"
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
            "kind=et.classes(10)) for several; or @et.loss() if the loss reads no labels.",
            code="loss.no-labels",
            loss=reference,
            place=place_of(function),
        )
    return function


def own_objective(reference: str, outputs: OutputForm, with_gradients: bool = False) -> Objective:
    """The objective of the user's own loss for a model with these outputs.

    With `with_gradients`, functions in the loss that define their own gradients keep these.

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
    return _recorded_objective(function, reference, outputs, with_gradients)


@lru_cache(maxsize=64)
def _recorded_objective(
    function: Loss, reference: str, form: OutputForm, with_gradients: bool
) -> Objective:
    """Record `function` once for these outputs, because every kind of device needs it."""
    labels: tuple[Part, ...] = getattr(function, ATTRIBUTE)
    outputs = form.parts
    with own_gradients() if with_gradients else nullcontext():
        graph, names = record_loss(function, reference, form)

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


class Unusable(Tensor):
    """An output with which a loss cannot compute. The loss may still receive it."""

    reason: Mapping[str, str]

    @classmethod
    def of(cls, name: str, reason: str, loss: str) -> "Unusable":
        """Stand for the output `name`."""
        output: Unusable = Tensor._make_subclass(cls, torch.empty(0))
        output.reason = {"output": name, "reason": reason, "loss": loss}
        return output

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise ModelError."""
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        own = next(value.reason for value in given if isinstance(value, Unusable))
        raise ModelError(
            "The loss {loss!r} reads the output {output!r}{place}, which cannot be passed to it: "
            "{reason}. Return tensors with one axis for the batch. Products of samples with each "
            "other, such as logits (batch, batch), can be computed in the loss.",
            code="loss.unusable-output",
            place=source_lines.called_place(),
            loss=own["loss"],
            output=own["output"],
            reason=own["reason"],
        )


class InBothModes(Named):
    """The outputs that a model returns in training and in inference.

    If a loss read an output of only one mode, or read all outputs, it would silently miss outputs
    in the other mode.
    """

    def __init__(self, outputs: Mapping[str, Any], hidden: frozenset[str], loss: str) -> None:
        super().__init__(outputs)
        self._hidden, self._loss = hidden, loss

    def __missing__(self, key: str) -> Any:
        """Raise ModelError for an output of one mode, else KeyError."""
        if key in {name.partition(".")[0] for name in self._hidden}:
            raise self._missed()
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        """Whether `key` is an output. Raises ModelError for an output of one mode."""
        return super().__contains__(key) or (self.get(str(key)) is not None)

    def get(self, key: str, default: Any = None) -> Any:
        """The output `key`. Raises ModelError if only one mode has this output."""
        try:
            return self[key]
        except KeyError:
            return default

    def __iter__(self) -> Any:
        """Raise ModelError."""
        raise self._missed()

    keys = values = items = __iter__

    def _missed(self) -> ModelError:
        return ModelError(
            "The loss {loss!r} reads outputs that the model returns only in training or only in "
            "inference: {outputs}. Return the same outputs in both modes, without `if "
            "self.training`, because the loss also evaluates the model.",
            code="loss.outputs-by-mode",
            loss=self._loss,
            outputs=", ".join(sorted(self._hidden)),
        )


class Reduced(nn.Module):
    """The user's loss as a model of two inputs: the packed outputs and the packed labels.

    `report` is called with the names of the results: the loss and the metrics. An attribute cannot
    store these names, because recording resets attributes.
    """

    def __init__(
        self,
        function: Loss,
        reference: str,
        outputs: OutputForm,
        report: Callable[[list[str]], object],
    ) -> None:
        super().__init__()
        self.function, self.reference, self.outputs = function, reference, outputs
        self.report, self.left_out = report, left_out(outputs, reference)

    def forward(self, output: Tensor, packed: Tensor) -> tuple[Tensor, ...]:
        """The mean loss of the batch, and the means of the metrics."""
        returned = self.returned(self.outputs.as_returned(output), packed)
        value: object = returned
        metrics: Any = {}
        if isinstance(returned, tuple) and len(returned) == 2:
            value, metrics = returned
        if not isinstance(metrics, Mapping):
            raise self._wrong(f"the second of the pair is a {type(metrics).__name__}")
        metrics = {f"own_{n}" if n in TAKEN else n: metric for n, metric in metrics.items()}
        for name in metrics:
            if not str(name).isidentifier():
                raise self._wrong(
                    f"{name!r} cannot be the name of a metric. Use a word such as iou"
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

    def returned(self, named: Mapping[str, Tensor], packed: Tensor) -> Any:
        """The result of the function for the outputs `named`, passed in the model's own form."""
        parts = getattr(self.function, ATTRIBUTE)
        labels = unpack(packed, parts) if in_files(parts) else None
        hidden = self.outputs.in_one_mode
        given: Any = named[""] if list(named) == [""] else nest({**named, **self.left_out})
        if hidden:
            given = InBothModes(given, hidden, self.reference)
        return self.function(given, labels)

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
            "The loss {loss!r}{place} does not return a loss: {problem}. {returns}.",
            code="loss.wrong-result",
            loss=self.reference,
            place=place_of(self.function),
            problem=problem,
            returns=RETURNS,
        )


def record_loss(function: Loss, reference: str, form: OutputForm) -> tuple[GraphModule, list[str]]:
    """Record the user's loss as a graph of (packed outputs, packed labels).

    Returns:
        The graph, and the names of its results.

    Raises:
        ModelError: The loss cannot be recorded, or does not return a loss.
    """
    labels: tuple[Part, ...] = getattr(function, ATTRIBUTE)
    names: list[list[str]] = []
    outputs = form.parts
    module = Reduced(function, reference, form, names.append)
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
            "labels {labels}. It must compute with torch's operators. If an `if` reads a value of "
            "a tensor, both branches must give tensors of the same shapes; torch.where is simpler.",
            code="loss.cannot-record",
            loss=reference,
            place=source_lines.place_of_error(error) or place_of(function),
            reason=said_by(error),
            outputs=described_parts(outputs) if outputs[0].name else "the output",
            labels=described_parts(in_files(labels)).strip() or "None",
        ) from error
    return graph, names[-1]


def left_out(form: OutputForm, loss: str) -> dict[str, Unusable | None]:
    """The values that the loss gets instead of outputs that cannot be passed to it."""
    return {
        name: None if reason == NONE else Unusable.of(name, reason, loss)
        for name, reason in form.left_out.items()
        if name not in form.in_one_mode
    }


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


def place_of(function: object) -> str:
    """The user's file and line of `function`, as ` (losses.py, line 3)`. Empty if unknown."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f" ({shown(Path(code.co_filename))}, line {code.co_firstlineno})"
