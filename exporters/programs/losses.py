"""What a training step minimises: losses of a model's output (batch, n) against its labels.

Each is the mean over the batch of a loss for one sample, written in operators whose gradients have
forward forms.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from device_agent.formats.manifest import Port
from profiles.errors import ModelError

Measure = Callable[[Tensor, Tensor], Tensor]
"""From output (batch, n) and labels to a number."""


@dataclass(frozen=True)
class Objective:
    """`loss` to be minimised; `correct` counts the samples that the output gets right, as float32.

    It is None for regression, where no output is right or wrong.
    """

    loss: Measure
    correct: Measure | None

    def labels(self, outputs: int) -> Port:
        """The labels of a model of `outputs` outputs: class indices, or numbers in its shape."""
        if self.correct is None:
            return Port(name="y", kind="labels", dtype="float32", shape=(None, outputs))
        return Port(name="y", kind="labels", dtype="int64", shape=(None,))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch of -log softmax(logits)[label]; logits (batch, classes).

    The label's term is picked by a comparison: it needs neither gather nor scatter.
    """
    picked = labels.unsqueeze(1) == torch.arange(logits.shape[1])
    return -(torch.log_softmax(logits, 1) * picked.to(logits.dtype)).sum(1).mean()


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch of -log of the label's probability, sigmoid(z) for 1; logits (batch, 1).

    That is max(z, 0) - z * y + log(1 + exp(-|z|)), written so that its gradient is right at z = 0.
    """
    z, y = logits.squeeze(1), labels.to(logits.dtype)
    log_sigmoid = torch.nn.functional.logsigmoid
    return -(y * log_sigmoid(z) + (1 - y) * log_sigmoid(-z)).mean()


def mean_squared_error(output: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch and the outputs of (output - label)^2; both (batch, n)."""
    return (output - labels).square().mean()


def right_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """Samples whose largest logit, the first of equal ones, is the label's; logits (batch, n).

    As argmax would say, from operators that every runtime has.
    """
    classes = logits.shape[1]
    places = torch.arange(classes).to(logits.dtype)
    largest = logits == logits.amax(1, keepdim=True)
    chosen = torch.where(largest, places, float(classes)).amin(1)
    return (chosen == labels.to(logits.dtype)).to(logits.dtype).sum()


def right_signs(logits: Tensor, labels: Tensor) -> Tensor:
    """Samples whose logit is above 0 where the label is 1, and only there; logits (batch, 1)."""
    chosen = (logits.squeeze(1) > 0).to(logits.dtype)
    return (chosen == labels.to(logits.dtype)).to(logits.dtype).sum()


BINARY = Objective(binary_cross_entropy, right_signs)
OBJECTIVES = {
    "cross-entropy": Objective(cross_entropy, right_classes),
    "binary-cross-entropy": BINARY,
    "mse": Objective(mean_squared_error, None),
}
"""By the name of the loss."""


def objective(loss: str, outputs: int) -> Objective:
    """The objective of the loss called `loss` for a model of `outputs` outputs.

    Cross-entropy is binary where there is a single output. Raises ModelError where the loss does
    not fit the output.
    """
    if loss == "binary-cross-entropy" and outputs != 1:
        raise ModelError(
            f"The loss {loss!r} needs a model with one output, a logit for two classes; this one "
            f'has {outputs}. Take "cross-entropy", or let the last layer have one output.'
        )
    return BINARY if loss == "cross-entropy" and outputs == 1 else OBJECTIVES[loss]
