"""Losses of named outputs: the loss of one output, or a weighted sum for several."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from msgspec.structs import replace as replaced
from torch import Tensor

from device_agent.formats.label_rule import IGNORED, LabelRule, output_of
from device_agent.formats.manifest import LOSS, Output, Part
from exporters.objectives.built_in import built_in
from exporters.objectives.loss_text import BuiltIn, Head
from exporters.objectives.own_loss_labels import rule_of_parts
from exporters.programs.output_parts import described_parts, part_of
from exporters.programs.training.losses import Measure, Objective, count_correct
from profiles.errors import ModelError

Parts = Sequence[Part]


def of_one_output(name: str, loss: BuiltIn, outputs: Parts) -> Objective:
    """The objective that trains one of several outputs.

    The objective takes labels only for this output.
    """
    part = _output(name, outputs)
    goal = built_in(loss, part.shape)
    if len(outputs) == 1:
        return goal

    def on(measure: Measure) -> Measure:
        return partial(_on_output, measure, part, outputs)

    return replace(
        goal,
        loss=on(goal.loss),
        predicted=None
        if goal.predicted is None
        else partial(_predicted, goal.predicted, part, outputs),
        absolute=None if goal.absolute is None else on(goal.absolute),
        metrics={key: on(own) for key, own in goal.metrics.items()},
        outputs=with_meaning(outputs, {name: goal.labels}),
        maskable=False,
        used=_numbers_of([name], outputs),
    )


def sum_of_heads(heads: Sequence[Head], outputs: Parts) -> Objective:
    """The objective that minimises the weighted sum of the losses of several outputs.

    The labels are one packed array. It has a part for each output, with the output's name. The
    metrics are the loss of each output, the accuracy of each output with classes, and the mean
    absolute error of each regression.
    """
    goals = {head.output: _goal(head, outputs) for head in heads}
    labels = [labels_part(name, goal.labels) for name, goal in goals.items()]
    terms, metrics = list[tuple[float, Measure]](), dict[str, Measure]()
    for head, label in zip(heads, labels, strict=True):
        goal, part = goals[head.output], _output(head.output, outputs)
        own = {LOSS: goal.loss, **goal.metrics}
        if goal.absolute is not None:
            own["mae"] = goal.absolute
        if goal.predicted is not None:
            own["accuracy"] = partial(_accuracy, goal)
        prefix = metric_prefix(head.output)
        for key, measure in own.items():
            metrics[prefix + key] = partial(_on_head, measure, part, outputs, label, labels)
        terms.append((head.weight, metrics[prefix + LOSS]))
    return Objective(
        partial(_weighted_sum, tuple(terms)),
        rule_of_parts(tuple(labels)),
        metrics=metrics,
        outputs=with_meaning(outputs, {name: goal.labels for name, goal in goals.items()}),
        used=_numbers_of(goals, outputs),
    )


def metric_prefix(output: str) -> str:
    """The prefix of the names of an output's metrics.

    Examples:
        >>> metric_prefix("kind"), metric_prefix("0"), metric_prefix("boxes.1")
        ('kind_', 'output_0_', 'boxes_1_')
    """
    name = output.replace(".", "_")
    return f"{name}_" if name.isidentifier() else f"output_{name}_"


def labels_part(name: str, labels: LabelRule) -> Part:
    """The array of labels for the output `name`."""
    if labels.parts:
        return replaced(labels.parts[0], name=name)
    limit = None if labels.highest is None else labels.highest + 1
    return Part(name=name, shape=labels.shape or (), dtype=labels.dtype, limit=limit)


def with_meaning(outputs: Parts, labels: Mapping[str, LabelRule]) -> tuple[Part, ...]:
    """Add to each output the rule that turns it into probabilities."""

    def meaning(part: Part) -> Output | None:
        if part.name not in labels:
            return None
        own = output_of(labels[part.name])
        if own == "sigmoid":  # a part keeps its shape, so it has only the probability of class 1
            return "independent"
        return None if own in ("numbers", "outputs") else own

    return tuple(replaced(part, output=meaning(part)) for part in outputs)


def _numbers_of(names: Collection[str], outputs: Parts) -> frozenset[int]:
    """The indices of the outputs `names` among `outputs`."""
    return frozenset(number for number, part in enumerate(outputs) if part.name in names)


def _goal(head: Head, outputs: Parts) -> Objective:
    if head.loss.name == "ctc":
        raise ModelError(
            "The loss 'ctc' cannot be part of a weighted sum. Train its output alone, "
            "{output}=ctc, or write a loss of your own.",
            code="model.loss-mismatch",
            loss="ctc",
            output=head.output,
        )
    return built_in(head.loss, _output(head.output, outputs).shape)


def _output(name: str, outputs: Parts) -> Part:
    """The output `name`. Raises ModelError if there is none."""
    for part in outputs:
        if part.name == name:
            return part
    raise ModelError(
        "The loss names the output {output!r}, but the model returns {outputs}. {remedy}",
        code="model.unknown-output",
        output=name,
        outputs=described_parts(outputs) if outputs[0].name else "a single tensor",
        remedy="Use one of these names."
        if outputs[0].name
        else "Leave the name of the output out.",
    )


def _on_output(
    measure: Measure, part: Part, outputs: Parts, output: Tensor, labels: Tensor
) -> Tensor:
    return measure(part_of(output, part, outputs), labels)


def _predicted(
    predicted: Callable[[Tensor], Tensor], part: Part, outputs: Parts, output: Tensor
) -> Tensor:
    return predicted(part_of(output, part, outputs))


def _on_head(
    measure: Measure,
    part: Part,
    outputs: Parts,
    label: Part,
    labels: Parts,
    output: Tensor,
    packed: Tensor,
) -> Tensor:
    return measure(part_of(output, part, outputs), part_of(packed, label, labels))


def _weighted_sum(terms: Sequence[tuple[float, Measure]], output: Tensor, labels: Tensor) -> Tensor:
    losses = [weight * measure(output, labels) for weight, measure in terms]
    return sum(losses[1:], losses[0])


def _accuracy(goal: Objective, output: Tensor, labels: Tensor) -> Tensor:
    """The share of the labels that are not IGNORED and are predicted correctly."""
    assert goal.predicted is not None
    counted = (labels != IGNORED).to(output.dtype).sum()
    return count_correct(goal.predicted, output, labels) / counted.clamp(min=1)
