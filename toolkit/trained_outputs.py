"""Describes each output of a model and the loss that trains it, for `edgetailor inspect`."""

from collections.abc import Sequence
from dataclasses import dataclass

from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import Part
from device_agent.formats.packing import array_name, in_files
from exporters.objectives.loss_text import BuiltIn, Own, parse
from exporters.objectives.objective import objective_of
from exporters.programs.output_parts import PREFERRED
from exporters.programs.recorded_graph import attributes_with_gradient
from exporters.programs.training.losses import Objective
from exporters.recording.captured import Captured


@dataclass(frozen=True)
class OutputUse:
    """One output of a model.

    Attributes:
        output: Its name. The outputs of a tuple are named "0", "1" and so on; a single tensor is
            named "output".
        shape: Shape for one sample; None if no loss can take it.
        use: The loss that trains this output, with its labels; or the reason why no loss trains it.
    """

    output: str
    shape: tuple[int, ...] | None
    use: str


@dataclass(frozen=True)
class TrainedOutputs:
    """The outputs of a model, and the trained parameters that no loss reaches.

    `usual` is true if the model returns only logits of classes, and the loss is plain
    cross-entropy.
    """

    outputs: tuple[OutputUse, ...]
    without_gradient: tuple[str, ...]
    usual: bool


def trained_outputs(captured: Captured, loss: str) -> TrainedOutputs:
    """Describe the outputs of a recorded model that is trained with `loss`.

    Raises:
        ModelError: The loss does not fit the outputs.
    """
    goal, form = objective_of(loss, captured), captured.outputs
    uses = [
        OutputUse(part.name or "output", part.shape, use(part, number, loss, goal, len(form.parts)))
        for number, part in enumerate(form.parts)
    ]
    uses += [
        OutputUse(name or "output", None, f"not trained: {reason}")
        for name, reason in form.left_out.items()
    ]
    reached = attributes_with_gradient(captured.training, goal.used)
    still = (name for name in captured.parameters if name not in reached)
    plain = parse(loss) == BuiltIn("cross-entropy") and len(uses) == 1
    return TrainedOutputs(tuple(uses), tuple(still), plain and not _is_logit(form.parts[0]))


def use(part: Part, number: int, loss: str, goal: Objective, outputs: int) -> str:
    """Describe how `loss` trains the output `part`, the number `number` of `outputs` outputs."""
    parsed = parse(loss)
    if isinstance(parsed, Own):
        if goal.used is not None and number not in goal.used:
            return f"not trained: {loss} has no gradient of it"
        return f"passed to {loss}; labels {labels_text(goal.labels)}"
    if isinstance(parsed, BuiltIn):
        if outputs > 1 and part.name != PREFERRED:
            return "not trained: the loss does not name it"
        return f"{meaning(parsed, part)}; labels {labels_text(goal.labels)}"
    own = [head for head in parsed if head.output == part.name]
    if not own:
        return "not trained: the loss does not name it"
    [head] = own
    labels = labels_text(goal.labels, None if len(parsed) == 1 else part.name)
    weight = "" if head.weight == 1 else f", weight {head.weight:g}"
    return f"{meaning(head.loss, part)}{weight}; labels {labels}"


def meaning(loss: BuiltIn, part: Part) -> str:
    """The meaning of an output for `loss`, such as numbers or classes."""
    if loss.numbers:
        return f"numbers, trained by {loss}"
    if loss.name == "contrastive":
        return f"an embedding, trained by {loss}"
    if loss.name in ("cross-entropy", "binary-cross-entropy") and _is_logit(part):
        return f"the logit of class 1 of two, trained by {loss} (for a regression, --loss mse)"
    if loss.name == "binary-cross-entropy":
        return f"a yes-or-no answer in each number, trained by {loss}"
    return f"logits of classes, trained by {loss}"


def _is_logit(part: Part) -> bool:
    """Whether the last axis of an output has size 1, or there is no axis: a single logit."""
    return part.shape[-1:] in ((1,), ())


def labels_text(labels: LabelRule, only: str | None = None) -> str:
    """The arrays of labels in words. If `only` is given, describe only the array of this output."""
    parts: Sequence[Part] = labels.parts or (
        Part(
            name="",
            shape=labels.shape or (),
            dtype=labels.dtype,
            limit=None if labels.highest is None else labels.highest + 1,
        ),
    )

    def text(part: Part) -> str:
        shape = ", ".join(map(str, ("N", *part.shape)))
        below = "" if part.limit is None else f" below {part.limit}"
        return f"{array_name('y', part)} {part.dtype} ({shape}){below}"

    held = in_files(parts)
    return ", ".join(text(part) for part in held if only in (None, part.name)) or "none"
