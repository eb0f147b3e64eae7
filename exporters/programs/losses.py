"""Losses of a model's output (batch, n) against its labels, and counts of correct samples.

Each loss is the mean over the batch of a loss for one sample. It uses only operators whose
gradients can be written with forward operators.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from device_agent.formats.manifest import Port
from profiles.errors import ModelError

Measure = Callable[[Tensor, Tensor], Tensor]
"""Maps output (batch, n) and labels to a scalar tensor."""


@dataclass(frozen=True)
class Objective:
    """A loss to minimise and a count of correct samples.

    Attributes:
        loss: The loss of a batch.
        correct: The number of correct samples in a batch, as float32; None for regression, where
            no output is correct or wrong.
    """

    loss: Measure
    correct: Measure | None

    def labels(self, outputs: int) -> Port:
        """Port for the labels: class indices (batch,); for regression, numbers (batch, outputs)."""
        if self.correct is None:
            return Port(name="y", kind="labels", dtype="float32", shape=(None, outputs))
        return Port(name="y", kind="labels", dtype="int64", shape=(None,))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch of -log softmax(logits)[label]; logits (batch, classes).

    A comparison selects the label's term, so that neither gather nor scatter is needed.
    """
    picked = labels.unsqueeze(1) == torch.arange(logits.shape[1])
    return -(torch.log_softmax(logits, 1) * picked.to(logits.dtype)).sum(1).mean()


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch of -log p(label), with p(1) = sigmoid(z); logits z (batch, 1).

    This is max(z, 0) - z * y + log(1 + exp(-|z|)), but with a correct gradient at z = 0.
    """
    z, y = logits.squeeze(1), labels.to(logits.dtype)
    log_sigmoid = torch.nn.functional.logsigmoid
    return -(y * log_sigmoid(z) + (1 - y) * log_sigmoid(-z)).mean()


def mean_squared_error(output: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch and the outputs of (output - label)^2; both (batch, n)."""
    return (output - labels).square().mean()


def count_correct_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """Count the samples with argmax(logits) == label; logits (batch, n).

    As in argmax, the first of equal logits wins. Every runtime has the operators used here.
    """
    classes = logits.shape[1]
    places = torch.arange(classes).to(logits.dtype)
    largest = logits == logits.amax(1, keepdim=True)
    # `classes` is above every index, so that the minimum is the first of the largest logits.
    chosen = torch.where(largest, places, float(classes)).amin(1)
    return (chosen == labels.to(logits.dtype)).to(logits.dtype).sum()


def count_correct_signs(logits: Tensor, labels: Tensor) -> Tensor:
    """Count the samples with (logit > 0) == label; logits (batch, 1)."""
    chosen = (logits.squeeze(1) > 0).to(logits.dtype)
    return (chosen == labels.to(logits.dtype)).to(logits.dtype).sum()


# Cross-entropy of a single output is this loss too; see `objective`.
BINARY = Objective(binary_cross_entropy, count_correct_signs)
OBJECTIVES = {
    "cross-entropy": Objective(cross_entropy, count_correct_classes),
    "binary-cross-entropy": BINARY,
    "mse": Objective(mean_squared_error, None),
}
"""Objectives by the name of the loss."""


def objective(loss: str, outputs: int) -> Objective:
    """Select the objective for a loss and a model's output width.

    Args:
        loss: A key of `OBJECTIVES`.
        outputs: Width of the model's output. For one output, cross-entropy is binary.

    Returns:
        The objective.

    Raises:
        ModelError: The loss does not fit the number of outputs.
    """
    if loss == "binary-cross-entropy" and outputs != 1:
        raise ModelError(
            f"The loss {loss!r} needs a model with one output, a logit for two classes; this model "
            f'has {outputs}. Use "cross-entropy", or give the last layer one output.',
            code="model.loss-mismatch",
            loss=loss,
            outputs=outputs,
        )
    return BINARY if loss == "cross-entropy" and outputs == 1 else OBJECTIVES[loss]
