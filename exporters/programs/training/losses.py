"""Losses of a model's output and its labels, predicted classes, and counts of correct predictions.

Logits have a class axis. There is one label for each position on the other axes:

| logits | class axis | labels |
|---|---|---|
| (batch, n) | 1 | (batch,) |
| (batch, t, n) | 2, the last | (batch, t) |
| (batch, n, h, w) and more axes | 1 | (batch, h, w) and more axes |

For two, four or more axes, this is the rule of `torch.nn.functional.cross_entropy`. For three axes,
PyTorch requires (batch, n, t), but models of sequences return (batch, t, n).

All functions use only operators whose gradients can be written with forward operators.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from device_agent.formats.label_rule import IGNORED, LabelRule, class_axis
from device_agent.formats.manifest import ABSOLUTE, CORRECT, LOSS, Part
from exporters.programs.training.ctc import UNREACHED, ctc_losses

SMALLEST = 1e-12
"""The least number by which a loss divides, or whose logarithm it takes."""

Measure = Callable[[Tensor, Tensor], Tensor]
"""Maps output and labels to a scalar tensor."""


@dataclass(frozen=True)
class Objective:
    """The objective of a training: its loss, its labels and the other measures of an evaluation.

    Attributes:
        loss: The loss of a batch.
        labels: The rule for labels: a class for each position, numbers, or several arrays.
        predicted: The predicted class at each position, in the type of the logits. None if there is
            no single output with classes.
        absolute: The mean absolute error, for a regression by `mse`; else None.
        metrics: Further means over the samples of a batch, by name.
        classes: Size of the output's class axis. 1 if the labels are 0 and 1, or if they are not
            classes.
        outputs: The outputs that `predict` returns packed, with their meanings. Empty for a single
            output.
        maskable: Whether the logits of classes that do not occur can be set to zero.
        own: Whether the loss is the user's own function.
        used: Indices of the packed outputs that the loss takes. None means all.
        together: Computes all measures at once, in the order of `measures`. None if each measure
            has a separate function.
    """

    loss: Measure
    labels: LabelRule
    predicted: Callable[[Tensor], Tensor] | None = None
    absolute: Measure | None = None
    metrics: Mapping[str, Measure] = field(default_factory=dict)
    classes: int = 1
    outputs: tuple[Part, ...] = ()
    maskable: bool = False
    own: bool = False
    used: frozenset[int] | None = None
    together: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None

    @property
    def correct(self) -> Measure | None:
        """The number of correct predictions in a batch, as float32; None without classes."""
        return None if self.predicted is None else partial(count_correct, self.predicted)

    @property
    def measures(self) -> dict[str, Measure]:
        """The loss and everything that an evaluation measures, by name."""
        known = {LOSS: self.loss, CORRECT: self.correct, ABSOLUTE: self.absolute, **self.metrics}
        return {name: measure for name, measure in known.items() if measure is not None}

    def measured(self, output: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The results of an evaluation on a batch, by name."""
        if self.together is not None:
            return dict(zip(self.measures, self.together(output, labels), strict=True))
        return {name: measure(output, labels) for name, measure in self.measures.items()}


def class_count(shape: tuple[int, ...]) -> int:
    """The size of an output's class axis. 1 if it has none. `shape` is without the batch axis.

    Examples:
        >>> class_count((10,)), class_count((128, 9)), class_count((21, 64, 64))
        (10, 9, 21)
    """
    return shape[class_axis(1 + len(shape)) - 1] if shape else 1


def along_classes(values: Tensor, axes: int) -> Tensor:
    """Reshape `values` (n,) so that they broadcast over logits with `axes` axes."""
    behind = axes - 1 - class_axis(axes)
    return values.view(-1, *[1] * behind) if behind else values


def mean_of_counted(losses: Tensor, labels: Tensor) -> Tensor:
    """Mean of `losses` over the positions whose label is not IGNORED. 0 if there are none.

    `losses` and `labels` have the shape (batch, ...). Labels of the shape (batch,) are never
    IGNORED, because a sample without a label is left out of the data.
    """
    if labels.dim() == 1:
        return losses.mean()
    counted = (labels != IGNORED).to(losses.dtype)
    # `clamp` changes only a sum of 0. Then the losses' sum and its gradient are 0 too.
    return (losses * counted).sum() / counted.sum().clamp(min=1)


def cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, weights: tuple[float, ...] = ()
) -> Tensor:
    """Mean of -log softmax(logits)[label] over the positions whose label is not IGNORED.

    A comparison selects the label's term, so that neither gather nor scatter is needed.

    Args:
        logits: Logits with a class axis.
        labels: The class at each position.
        smoothing: The share s of each label that is distributed evenly over all C classes (Szegedy
            et al. 2016): the label's term is (1 - s) * -log p[label] + s / C * sum_c -log p[c].
        weights: A weight w for each class. Each -log p[c] is multiplied by w[c], and the sum over
            the positions is divided by the sum of w[label]. Empty if all classes have equal weight.
    """
    axis = class_axis(logits.dim())
    classes = logits.shape[axis]
    picked = labels.unsqueeze(axis) == along_classes(torch.arange(classes), logits.dim())
    chosen, terms = picked.to(logits.dtype), torch.log_softmax(logits, axis)
    if weights:
        terms = terms * along_classes(torch.tensor(weights, dtype=logits.dtype), logits.dim())
    losses = -(terms * chosen).sum(axis)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing / classes * terms.sum(axis)
    if not weights:
        return mean_of_counted(losses, labels)
    own = along_classes(torch.tensor(weights, dtype=logits.dtype), logits.dim())
    shares = (chosen * own).sum(axis)  # zero where the label is IGNORED
    counted = (labels != IGNORED).to(logits.dtype)
    return (losses * counted).sum() / shares.sum().clamp(min=SMALLEST)


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log p(label) over the labels that are not IGNORED.

    The model computes one logit z for each label, and p(1) = sigmoid(z). The term of a label y is
    max(z, 0) - z * y + log(1 + exp(-|z|)), but with a correct gradient at z = 0.
    """
    return independent_cross_entropy(logits.squeeze(class_axis(logits.dim())), labels)


def mean_squared_error(output: Tensor, labels: Tensor) -> Tensor:
    """Mean over all numbers of (output - label)^2; both (batch, ...)."""
    return (output - labels).square().mean()


def mean_absolute_error(output: Tensor, labels: Tensor) -> Tensor:
    """Mean over all numbers of |output - label|; both (batch, ...)."""
    error = output - labels
    return (functional.relu(error) + functional.relu(-error)).mean()


def independent_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log p(label) over the labels that are not IGNORED, one logit for each (multi-label).

    Logits and labels, which are 0 or 1, have the same shape (batch, n) or more axes. p(1) is
    sigmoid(z), as in `binary_cross_entropy`.
    """
    y = labels.to(logits.dtype)
    losses = y * functional.logsigmoid(logits) + (1 - y) * functional.logsigmoid(-logits)
    return -mean_of_counted(losses, labels)


def huber(output: Tensor, labels: Tensor, delta: float = 1.0) -> Tensor:
    """Mean over all numbers of Huber's loss of e = output - label; both (batch, ...).

    If |e| is at most delta, the loss is e^2 / 2. Otherwise it is delta * (|e| - delta / 2).
    """
    error = output - labels
    size = functional.relu(error) + functional.relu(-error)
    near = size.clamp(max=delta)
    return (0.5 * near.square() + delta * (size - near)).mean()


def cosine_distance(output: Tensor, labels: Tensor) -> Tensor:
    """Mean over the samples of 1 - cos(output, label); both (batch, n)."""
    lengths = [value.square().sum(1).clamp(min=SMALLEST).sqrt() for value in (output, labels)]
    return 1 - ((output * labels).sum(1) / (lengths[0] * lengths[1])).mean()


def dice(logits: Tensor, labels: Tensor) -> Tensor:
    """One minus the soft Dice coefficient (Milletari et al. 2016), a mean over samples and classes.

    The coefficient for a sample and a class is (2 * sum p * g + 1) / (sum p + sum g + 1). Here p
    are the probabilities of the class at all positions that are not IGNORED. g is 1 at positions
    with the label of this class, else 0. If there is one logit for two classes, only class 1
    counts.

    Args:
        logits: (batch, n, h, w), (batch, t, n) or more axes.
        labels: The class at each position, (batch, h, w) or (batch, t).
    """
    axis = class_axis(logits.dim())
    classes = logits.shape[axis]
    counted = (labels != IGNORED).to(logits.dtype).unsqueeze(axis)
    if classes == 1:
        probable, label = torch.sigmoid(logits), (labels == 1).to(logits.dtype).unsqueeze(axis)
    else:
        numbers = along_classes(torch.arange(classes), logits.dim())
        probable = torch.softmax(logits, axis)
        label = (labels.unsqueeze(axis) == numbers).to(logits.dtype)
    probable, label = probable * counted, label * counted
    positions = [other for other in range(1, logits.dim()) if other != axis]
    overlap = (probable * label).sum(positions)
    sizes = probable.sum(positions) + label.sum(positions)
    return 1 - ((2 * overlap + 1) / (sizes + 1)).mean()


def contrastive(output: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """The supervised contrastive loss of a batch (Khosla et al. 2020, eq. 2).

    Let z be the outputs (batch, n) divided by their lengths. The loss of the sample i is the mean
    of -log(exp(z_i.z_p / T) / sum_a exp(z_i.z_a / T)) over the other samples p with the label of i.
    Here a runs over all samples except i. The loss of the batch is the mean over the samples whose
    label occurs several times.

    Args:
        output: An embedding of each sample, (batch, n).
        labels: The class of each sample, (batch,) or (batch, 1), as any type.
        temperature: The number T by which the similarities are divided.
    """
    z = output / output.square().sum(1, keepdim=True).clamp(min=SMALLEST).sqrt()
    own = labels.reshape(-1, 1)
    # `arange` would need the size of the batch as a number.
    index = torch.cumsum(torch.ones_like(output[:, :1]), 0)
    other = (index != index.T).to(output.dtype)
    scores = z @ z.T / temperature
    # The largest similarity is 1, so that no exponential overflows.
    powers = torch.exp(scores - 1 / temperature) * other
    logs = scores - 1 / temperature - torch.log(powers.sum(1, keepdim=True).clamp(min=SMALLEST))
    same = (own == own.T).to(output.dtype) * other
    partners = same.sum(1)
    losses = -(same * logs).sum(1) / partners.clamp(min=1)
    sharing = (partners > 0).to(output.dtype)
    return (losses * sharing).sum() / sharing.sum().clamp(min=1)


def connectionist_temporal_classification(logits: Tensor, labels: Tensor) -> Tensor:
    """CTC (Graves et al. 2006) with class 0 as the blank, as a mean over the labels.

    Logits are (batch, t, n). Labels (batch, t) have the sample's sequence first, then IGNORED. The
    loss of a sample is 0 if it has no labels, or if t steps are too few for its labels (like
    PyTorch's `zero_infinity`).
    """
    counted = labels != IGNORED
    lengths = counted.to(torch.int64).sum(1)
    losses = ctc_losses(torch.log_softmax(logits, 2), labels, lengths)
    losses = torch.where((losses < -UNREACHED / 2) & (lengths > 0), losses, 0.0)
    return losses.sum() / counted.to(logits.dtype).sum().clamp(min=1)


def count_correct(predicted: Callable[[Tensor], Tensor], logits: Tensor, labels: Tensor) -> Tensor:
    """Count the positions at which the class in `predicted` is the label.

    Positions with the label IGNORED do not count, because no class has this number.
    """
    return (predicted(logits) == labels.to(logits.dtype)).to(logits.dtype).sum()


def likeliest_classes(logits: Tensor) -> Tensor:
    """The predicted class at each position, argmax(logits).

    As in argmax, the first of equal logits decides. If a logit is nan, the result is the number of
    classes, which is not a class. Every runtime has the operators that this function uses.
    """
    axis = class_axis(logits.dim())
    classes = logits.shape[axis]
    numbers = along_classes(torch.arange(classes).to(logits.dtype), logits.dim())
    largest = logits == logits.amax(axis, keepdim=True)
    # `classes` is above every index, so that the minimum is the first of the largest logits.
    return torch.where(largest, numbers, float(classes)).amin(axis)


def positive_logits(logits: Tensor) -> Tensor:
    """The predicted class at each position: 1 if its only logit is above 0, else 0."""
    return (logits.squeeze(class_axis(logits.dim())) > 0).to(logits.dtype)


def positive_answers(logits: Tensor) -> Tensor:
    """The predicted answers to independent questions: 1 if the logit is above 0, else 0."""
    return (logits > 0).to(logits.dtype)
