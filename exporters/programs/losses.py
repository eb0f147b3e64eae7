"""Losses of a model's output against its labels, predicted classes, and how many are correct.

Logits have a class axis, and one label for each position of the other axes:

| logits | class axis | labels |
|---|---|---|
| (batch, n) | 1 | (batch,) |
| (batch, t, n) | 2, the last | (batch, t) |
| (batch, n, h, w) and more axes | 1 | (batch, h, w) and more axes |

With two, four or more axes this is the rule of `torch.nn.functional.cross_entropy`. With three axes
PyTorch wants (batch, n, t), but models of sequences return (batch, t, n).

All functions use only operators whose gradients can be written with forward operators.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from device_agent.formats.label_rule import IGNORED, LabelRule, class_axis
from profiles.errors import ModelError

UNREACHED = -1e30
"""The logarithm of a probability of 0, small enough that adding to it changes nothing."""

Measure = Callable[[Tensor, Tensor], Tensor]
"""Maps output and labels to a scalar tensor."""


@dataclass(frozen=True)
class Measures:
    """A loss and the classes that are predicted.

    Attributes:
        loss: The loss of a batch.
        predicted: The class that is predicted at each position, in the type of the logits; None
            if no single output is a class: for a regression and for CTC.
        absolute: The mean absolute error of a regression; else None.
    """

    loss: Measure
    predicted: Callable[[Tensor], Tensor] | None
    absolute: Measure | None = field(default=None, kw_only=True)

    @property
    def correct(self) -> Measure | None:
        """The number of correct predictions in a batch, as float32; None without classes."""
        return None if self.predicted is None else partial(count_correct, self.predicted)


@dataclass(frozen=True)
class Objective(Measures):
    """The loss of a model, and the labels that it needs.

    Attributes:
        labels: The rule for labels: a class for each position; for regression, numbers in the
            shape of the output.
    """

    labels: LabelRule


def class_count(shape: tuple[int, ...]) -> int:
    """The size of the class axis of an output of `shape`, without the batch; 1 for (batch,).

    Examples:
        >>> class_count((10,)), class_count((128, 9)), class_count((21, 64, 64))
        (10, 9, 21)
    """
    return shape[class_axis(1 + len(shape)) - 1] if shape else 1


def along_classes(values: Tensor, axes: int) -> Tensor:
    """Reshape `values` (n,) so that they broadcast over logits with this number of axes."""
    behind = axes - 1 - class_axis(axes)
    return values.view(-1, *[1] * behind) if behind else values


def mean_of_counted(losses: Tensor, labels: Tensor) -> Tensor:
    """Mean of `losses` over the positions whose label is not IGNORED; 0 if there is none.

    Both have the shape (batch, ...). Labels of the shape (batch,) are never IGNORED, because a
    sample without a label is left out of the data.
    """
    if labels.dim() == 1:
        return losses.mean()
    counted = (labels != IGNORED).to(losses.dtype)
    # `clamp` changes only a sum of 0. Then the losses' sum and its gradient are 0 too.
    return (losses * counted).sum() / counted.sum().clamp(min=1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log softmax(logits)[label] over the positions whose label is not IGNORED.

    A comparison selects the label's term, so that neither gather nor scatter is needed.
    """
    axis = class_axis(logits.dim())
    picked = labels.unsqueeze(axis) == along_classes(torch.arange(logits.shape[axis]), logits.dim())
    terms = torch.log_softmax(logits, axis) * picked.to(logits.dtype)
    return -mean_of_counted(terms.sum(axis), labels)


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log p(label) over the labels that are not IGNORED.

    The model computes one logit z for each label, and p(1) = sigmoid(z). The term of a label y is
    max(z, 0) - z * y + log(1 + exp(-|z|)), but with a correct gradient at z = 0.
    """
    z, y = logits.squeeze(class_axis(logits.dim())), labels.to(logits.dtype)
    log_sigmoid = functional.logsigmoid
    return -mean_of_counted(y * log_sigmoid(z) + (1 - y) * log_sigmoid(-z), labels)


def mean_squared_error(output: Tensor, labels: Tensor) -> Tensor:
    """Mean over all numbers of (output - label)^2; both (batch, ...)."""
    return (output - labels).square().mean()


def mean_absolute_error(output: Tensor, labels: Tensor) -> Tensor:
    """Mean over all numbers of |output - label|; both (batch, ...)."""
    error = output - labels
    return (functional.relu(error) + functional.relu(-error)).mean()


def connectionist_temporal_classification(logits: Tensor, labels: Tensor) -> Tensor:
    """CTC (Graves et al. 2006) with class 0 as the blank, as a mean over the labels.

    Logits are (batch, t, n). Labels (batch, t) are a sample's sequence first, then IGNORED. The
    loss of a sample is 0 if it has no labels or, as with PyTorch's `zero_infinity`, if t steps are
    too few for its labels.

    Computes the logarithms of the forward variables (eq. 6 of the paper) in t unrolled steps.
    """
    batch, steps, classes = logits.shape
    counted = labels != IGNORED
    # Blanks stand before, between and after the labels. Positions after the last are not reached.
    spoken = torch.where(counted, labels, 0)
    blanks = torch.zeros_like(spoken)
    written = torch.stack((blanks, spoken), 2).reshape(batch, 2 * steps)
    written = torch.cat((written, blanks[:, :1]), 1)
    picked = (written[:, :, None] == torch.arange(classes)).to(logits.dtype)
    scores = torch.log_softmax(logits, 2) @ picked.transpose(1, 2)
    # A label may follow another one without a blank between them if the two differ.
    other = (written[:, 2:] != written[:, :-2]) & (written[:, 2:] != 0)
    skipping = torch.where(other, 0.0, UNREACHED).to(logits.dtype)
    positions = torch.arange(2 * steps + 1)
    alpha = scores[:, 0] + torch.where(positions < 2, 0.0, UNREACHED).to(logits.dtype)
    for step in range(1, steps):
        ahead = torch.stack(
            (
                alpha,
                functional.pad(alpha[:, :-1], (1, 0), value=UNREACHED),
                functional.pad(alpha[:, :-2] + skipping, (2, 0), value=UNREACHED),
            ),
            2,
        )
        alpha = scores[:, step] + torch.logsumexp(ahead, 2)
    length = counted.to(torch.int64).sum(1, keepdim=True)
    final = (positions == 2 * length) | (positions == 2 * length - 1)
    losses = -torch.logsumexp(torch.where(final, alpha, UNREACHED), 1)
    losses = torch.where((losses < -UNREACHED / 2) & (length[:, 0] > 0), losses, 0.0)
    return losses.sum() / counted.to(logits.dtype).sum().clamp(min=1)


def count_correct(predicted: Callable[[Tensor], Tensor], logits: Tensor, labels: Tensor) -> Tensor:
    """Count the positions where the class that `predicted` gives is the label.

    Positions with the label IGNORED do not count, because no class has this number.
    """
    return (predicted(logits) == labels.to(logits.dtype)).to(logits.dtype).sum()


def likeliest_classes(logits: Tensor) -> Tensor:
    """argmax(logits): the predicted class at each position.

    As in argmax, the first of equal logits wins. If a logit is not a number, the result is no
    class: the number of classes. Every runtime has the operators used here.
    """
    axis = class_axis(logits.dim())
    classes = logits.shape[axis]
    numbers = along_classes(torch.arange(classes).to(logits.dtype), logits.dim())
    largest = logits == logits.amax(axis, keepdim=True)
    # `classes` is above every index, so that the minimum is the first of the largest logits.
    return torch.where(largest, numbers, float(classes)).amin(axis)


def positive_logits(logits: Tensor) -> Tensor:
    """logit > 0: the predicted class, 0 or 1, at each position; every position has one logit."""
    return (logits.squeeze(class_axis(logits.dim())) > 0).to(logits.dtype)


MEASURES = {
    "cross-entropy": Measures(cross_entropy, likeliest_classes),
    "binary-cross-entropy": Measures(binary_cross_entropy, positive_logits),
    "ctc": Measures(connectionist_temporal_classification, None),
    "mse": Measures(mean_squared_error, None, absolute=mean_absolute_error),
}
"""Measures by the name of the loss."""


def objective(loss: str, shape: tuple[int, ...]) -> Objective:
    """Select the objective for a loss and a model's output.

    Args:
        loss: A key of `MEASURES`.
        shape: Shape of the model's output, without the batch. If the class axis has size 1,
            cross-entropy is binary.

    Returns:
        The objective.

    Raises:
        ModelError: The loss does not fit the output.

    Examples:
        >>> objective("cross-entropy", (21, 64, 64)).labels.shape
        (64, 64)
    """
    measures = MEASURES[loss]
    if loss == "mse":
        labels = LabelRule(None, shape, "float32")
        return Objective(measures.loss, None, labels, absolute=measures.absolute)
    if loss == "ctc":
        if len(shape) != 2 or shape[1] < 2:
            raise ModelError(
                "The loss 'ctc' needs logits (batch, t, n) with at least two classes; class 0 is "
                "the blank. This model's output is {output}.",
                code="model.loss-mismatch",
                loss=loss,
                shape=list(shape),
                output=("batch", *shape),
            )
        return Objective(measures.loss, None, LabelRule(shape[1], shape[:1], sequence=True))
    if not shape:
        raise ModelError(
            "The loss {loss!r} needs logits with a class axis: (batch, n), (batch, t, n) or "
            "(batch, n, h, w). This model's output is (batch,). Give it an axis for the classes; "
            "for two classes, its size can be 1.",
            code="model.loss-mismatch",
            loss=loss,
            shape=list(shape),
        )
    classes = class_count(shape)
    if loss == "binary-cross-entropy" and classes != 1:
        raise ModelError(
            "The loss {loss!r} needs a model with one output, the logit of class 1. This model "
            'has {outputs} outputs. Use "cross-entropy". If the outputs z are several yes-or-no '
            "answers for one sample, return torch.stack([torch.zeros_like(z), z], -1).",
            code="model.loss-mismatch",
            loss=loss,
            outputs=classes,
        )
    if classes == 1:
        measures = MEASURES["binary-cross-entropy"]
    axis = class_axis(1 + len(shape)) - 1
    positions = (*shape[:axis], *shape[axis + 1 :])
    return Objective(measures.loss, measures.predicted, LabelRule(classes, positions))
