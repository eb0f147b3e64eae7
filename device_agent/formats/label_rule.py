"""The rule for the labels that a model takes, and which labels count."""

from dataclasses import dataclass

import numpy as np
from msgspec import UNSET

from device_agent.formats.manifest import PREDICT, Dtype, Manifest, Output, Part, Port

IGNORED = -100
"""The label of a position that is left out of the loss and the accuracy, as in PyTorch."""


@dataclass(frozen=True)
class LabelRule:
    """The labels that a model takes.

    Attributes:
        classes: The size of the output's class axis. If the size is 1, the labels are 0 and 1. None
            for a regression, or if the model is not known yet.
        shape: Shape of the labels of one sample: () for one class, (t,) for a class for each step
            of a sequence, (h, w) for a class for each point of an image. In a regression it is the
            shape of the output. None if the model is not known yet.
        dtype: int64 for classes, float32 for a regression.
        sequence: Whether the labels of a sample are one sequence (CTC). In a sequence, IGNORED is
            allowed only after the end, and 0 is not a label, because it is the blank.
        parts: The arrays of labels that are packed into one float32 array, because only the loss
            knows their meaning. Empty for all other labels.
        independent: Whether each number of the output answers a separate yes-or-no question
            (multi-label). If so, the labels are 0 and 1 and have the shape of the output.

    Examples:
        >>> LabelRule(10).highest, LabelRule(1).highest
        (9, 1)
    """

    classes: int | None
    shape: tuple[int, ...] | None = ()
    dtype: Dtype = "int64"
    sequence: bool = False
    parts: tuple[Part, ...] = ()
    independent: bool = False

    @property
    def as_read(self) -> "LabelRule":
        """The rule for the labels before they are packed. Without packing, it is this rule."""
        if len(self.parts) != 1:
            return self
        (part,) = self.parts
        return LabelRule(part.limit, part.shape, part.dtype)

    @property
    def highest(self) -> int | None:
        """The largest class; None if the model is not known yet."""
        return None if self.classes is None else max(self.classes, 2) - 1


def label_rule(manifest: Manifest) -> LabelRule:
    """The rule for labels of the bundle with `manifest`, even if this bundle only predicts."""
    if manifest.output is not UNSET:
        return predicted_labels(manifest, manifest.output)
    ports = (port for signature in manifest.signatures.values() for port in signature.inputs)
    labels = next((port for port in ports if port.kind == "labels"), None)
    predict = manifest.signatures.get(PREDICT)
    return rule_of(labels, manifest.classes, None if predict is None else predict.outputs[0].shape)


def predicted_labels(manifest: Manifest, output: Output) -> LabelRule:
    """The rule for labels that fit the predictions of a bundle that only predicts.

    The rule is derived from `output`, the shape of the model's output, and the number of classes.
    """
    shape = tuple(n for n in manifest.signatures[PREDICT].outputs[0].shape[1:] if n is not None)
    if output in ("numbers", "outputs"):
        return LabelRule(None, shape, "float32")
    if output == "independent":
        return LabelRule(1, shape, independent=True)
    axis = class_axis(1 + len(shape)) - 1
    positions = (*shape[:axis], *shape[axis + 1 :])
    return LabelRule(manifest.classes, positions, sequence=output == "ctc")


def rule_of(
    port: Port | None, classes: int, output: tuple[int | None, ...] | None = None
) -> LabelRule:
    """The rule for the labels that `port` takes. If `port` is None, each sample has one class.

    `output` is the shape of the model's output, including the batch axis.
    """
    if port is None:
        return LabelRule(classes)
    # In the shape of a port, only the batch size is None.
    shape = tuple(size for size in port.shape[1:] if size is not None)
    if port.packed:
        return LabelRule(None, shape, port.dtype, parts=port.packed)
    # The labels of a single logit have no class axis. The labels of independent logits have the
    # class axis of the output.
    independent = port.dtype == "int64" and classes == 1 and bool(shape) and port.shape == output
    return LabelRule(classes, shape, port.dtype, port.sequence, independent=independent)


def output_of(labels: LabelRule) -> Output:
    """How the output of a model with these labels is turned into probabilities."""
    if labels.parts:
        return "outputs"
    if labels.independent:
        return "independent"
    if labels.dtype == "float32":
        return "numbers"
    if labels.sequence:
        return "ctc"
    return "sigmoid" if labels.classes == 1 else "softmax"


def class_axis(axes: int) -> int:
    """The class axis of a model's output with `axes` axes, including the batch axis.

    The class axis is the second axis. In models of sequences it is the last axis: their output is
    (batch, t, classes).
    """
    return 2 if axes == 3 else 1


def count_labels(y: np.ndarray) -> int:
    """Count the labels in `y`: classes that are not IGNORED, or the samples of a regression.

    Examples:
        >>> count_labels(np.array([[0, 1, IGNORED], [2, IGNORED, IGNORED]]))
        3
    """
    return int(np.count_nonzero(y != IGNORED)) if y.dtype == np.int64 else len(y)
