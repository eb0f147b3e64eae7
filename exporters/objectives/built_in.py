"""The objectives of built-in losses: a loss, the labels that it takes, and further metrics."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from device_agent.formats.label_rule import LabelRule, class_axis
from device_agent.formats.manifest import Part
from exporters.objectives.loss_text import BuiltIn
from exporters.objectives.own_loss_labels import rule_of_parts
from exporters.programs.training import losses
from exporters.programs.training.losses import Objective, class_count
from profiles.errors import ModelError

Shape = tuple[int, ...]


def built_in(loss: BuiltIn, shape: Shape) -> Objective:
    """The objective for a built-in loss of an output.

    Args:
        loss: The loss.
        shape: Shape of the output, without the batch.

    Raises:
        ModelError: The loss does not fit the output.

    Examples:
        >>> built_in(BuiltIn("cross-entropy"), (21, 64, 64)).labels.shape
        (64, 64)
    """
    return MAKERS[loss.name](loss, shape)


def _numbers(loss: BuiltIn, shape: Shape) -> Objective:
    """A regression: the labels are numbers in the shape of the output."""
    labels = LabelRule(None, shape, "float32")
    absolute = losses.mean_absolute_error
    match loss.name:
        case "mse":
            return Objective(losses.mean_squared_error, labels, absolute=absolute)
        case "mae":
            return Objective(absolute, labels)
        case "huber":
            own = partial(losses.huber, delta=loss.option("delta"))
            return Objective(own, labels, metrics={"mae": absolute})
    _check_embedding(loss, shape)
    return Objective(losses.cosine_distance, labels)


def _contrastive(loss: BuiltIn, shape: Shape) -> Objective:
    """An embedding of each sample. Any integers are labels, because only equality counts."""
    _check_embedding(loss, shape)
    part = Part(name="", shape=(), dtype="int64")
    own = partial(losses.contrastive, temperature=loss.option("temperature"))
    return Objective(own, rule_of_parts((part,)))


def _check_embedding(loss: BuiltIn, shape: Shape) -> None:
    if len(shape) != 1:
        raise _misfit(loss, shape, "one vector for each sample, an output (batch, n)")


def _misfit(loss: BuiltIn, shape: Shape, needs: str, instead: str = "") -> ModelError:
    """The error for an output of another shape than the loss needs."""
    return ModelError(
        "The loss {loss!r} needs {needs}. This model's output is {output}.{instead}",
        code="model.loss-mismatch",
        loss=loss.name,
        needs=needs,
        shape=list(shape),
        output=("batch", *shape),
        instead=instead and f" {instead}",
    )


def _ctc(loss: BuiltIn, shape: Shape) -> Objective:
    """Sequences of labels without known positions."""
    if len(shape) != 2 or shape[1] < 2:
        needs = "logits (batch, t, n) with at least two classes; class 0 is the blank"
        raise _misfit(loss, shape, needs)
    labels = LabelRule(shape[1], shape[:1], sequence=True)
    own = losses.connectionist_temporal_classification
    return Objective(own, labels, classes=shape[1])


def _classes(loss: BuiltIn, shape: Shape) -> Objective:
    """A class at each position."""
    binary = loss.name == "binary-cross-entropy"
    if not shape and not binary:
        raise _misfit(
            loss,
            shape,
            "logits with a class axis: (batch, n), (batch, t, n) or (batch, n, h, w)",
            "For two classes, use the loss 'binary-cross-entropy'; for a regression, 'mse'.",
        )
    classes, axis = class_count(shape), class_axis(1 + len(shape)) - 1
    labels = LabelRule(classes, (*shape[:axis], *shape[axis + 1 :]))
    if binary and (classes > 1 or not shape):
        # Each number answers a question of its own. With class count 1, older readers of the
        # manifest take the labels 0 and 1, too.
        labels = LabelRule(1, shape, independent=bool(shape))  # a single answer is a class
        return Objective(losses.independent_cross_entropy, labels, losses.positive_answers)
    if loss.name == "dice" and not labels.shape:
        raise _misfit(
            loss,
            shape,
            "a class for each of several positions: logits (batch, n, h, w) or (batch, t, n)",
            "Use 'cross-entropy'.",
        )
    weights = loss.option("weights") if loss.name == "cross-entropy" else ()
    if loss.options and (classes == 1 or len(weights) not in (0, classes)):
        raise ModelError(
            "The loss {loss!r} does not fit the model's {classes} classes: `weights` needs a "
            "number for each class, and a single logit takes no options.",
            code="model.loss-mismatch",
            loss=str(loss),
            classes=classes,
        )
    predicted = losses.positive_logits if classes == 1 else losses.likeliest_classes
    goal = Objective(losses.binary_cross_entropy, labels, predicted, classes=classes)
    if loss.name == "dice":
        return replace(goal, loss=losses.dice)
    if classes == 1:
        return goal
    own = partial(losses.cross_entropy, smoothing=loss.option("smoothing"), weights=weights)
    return replace(goal, loss=own if loss.options else losses.cross_entropy, maskable=True)


MAKERS: dict[str, Callable[[BuiltIn, Shape], Objective]] = {
    "cross-entropy": _classes,
    "binary-cross-entropy": _classes,
    "dice": _classes,
    "ctc": _ctc,
    "mse": _numbers,
    "mae": _numbers,
    "huber": _numbers,
    "cosine": _numbers,
    "contrastive": _contrastive,
}
"""Makes the objective of each built-in loss, by its name."""
