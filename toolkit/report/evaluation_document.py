"""The document of `edgetailor evaluate --json`, which `edgetailor report` draws."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from device_agent.formats.class_counts import ClassCounts, mean_of_classes, worst_class
from device_agent.formats.manifest import Struct
from device_agent.formats.protocol.fleet import FederatedEvaluation
from profiles.errors import InputError
from profiles.json_decoding import MalformedError, decode_json

if TYPE_CHECKING:
    from toolkit.evaluation_sums import Evaluation

EVALUATION_VERSION = 1
CONFUSION = "confusion"


class ClassFigures(Struct, frozen=True, kw_only=True):
    """How the labels of a class are predicted.

    Attributes:
        name: The name of the class, from `[data]` of the federation's file; None if not known.
        labels: Number of labels.
        correct: How many of these labels are predicted correctly.
        accuracy: The share of labels predicted correctly; None for a class without labels.
    """

    name: str | None = None
    labels: int
    correct: int
    accuracy: float | None


class EvaluationDocument(Struct, frozen=True, kw_only=True):
    """An evaluation of a model on held-out data.

    Attributes:
        version: Format version.
        document: The kind of this document.
        model: The model's reference.
        weights: The name of the file with the model's weights; None with a federation.
        round: The round whose model was evaluated; None without a federation.
        samples: Number of samples.
        counted: Number of labels that count.
        accuracy: Share of labels predicted correctly; None for a regression and for CTC.
        loss: Mean loss; None if it is not finite.
        rmse: Root of the mean squared error; only of a regression.
        mae: Mean absolute error; only of a regression.
        metrics: Means of other figures that the loss computes for each sample, by name.
        mean_class_accuracy: Mean of the accuracies of the classes with labels.
        worst_class: The number of the class that is far below this mean; None if there is none.
        classes: The figures of each class; None if there is no accuracy, or if there are more than
            1,000 classes.
        devices: How the devices judge the model of this round; None if they do not judge.
        confusion: For each class a row: how many of its labels are predicted as each class.
        judged_by_devices: Whether all figures come from the devices, because there are no held-out
            data.
    """

    version: int = EVALUATION_VERSION
    document: Literal["evaluation"] = "evaluation"
    model: str
    weights: str | None = None
    round: int | None = None
    samples: int
    counted: int
    accuracy: float | None = None
    loss: float | None = None
    rmse: float | None = None
    mae: float | None = None
    metrics: dict[str, float] | None = None
    mean_class_accuracy: float | None = None
    worst_class: int | None = None
    classes: tuple[ClassFigures, ...] | None = None
    devices: FederatedEvaluation | None = None
    confusion: tuple[tuple[int, ...], ...] | None = None
    judged_by_devices: bool = False

    @property
    def title(self) -> str:
        """The model and its round or weights."""
        if self.round is not None:
            by = ", judged by the devices" if self.judged_by_devices else ""
            return f"{self.model} after round {self.round}{by}"
        return self.model if self.weights is None else f"{self.model} with {self.weights}"

    def class_label(self, number: int) -> str:
        """The number of a class, and its name in printable letters if it has one."""
        name = None if self.classes is None else self.classes[number].name
        if name is None:
            return str(number)
        return f"{number} {''.join(c if c.isprintable() else ' ' for c in name)}"


def evaluation_document(
    figures: "Evaluation | FederatedEvaluation",
    model: str,
    round_: int | None = None,
    names: Sequence[str] = (),
    devices: FederatedEvaluation | None = None,
    weights: str | None = None,
) -> EvaluationDocument:
    """Make the document of an evaluation on held-out data, or of the devices' pooled figures.

    `names` are the names of the classes, or empty.
    """
    counts = figures.classes or ()
    confusion = None if isinstance(figures, FederatedEvaluation) else figures.confusion
    return EvaluationDocument(
        model=model,
        weights=weights,
        round=round_,
        samples=figures.samples,
        counted=figures.counted,
        accuracy=figures.accuracy,
        loss=figures.loss,
        rmse=figures.rmse,
        mae=figures.mae,
        metrics=figures.metrics or None,
        mean_class_accuracy=mean_of_classes(counts),
        worst_class=worst_class(counts),
        classes=class_figures(counts, names) if counts else None,
        devices=devices,
        confusion=None if confusion is None else tuple(map(tuple, confusion.tolist())),
        judged_by_devices=isinstance(figures, FederatedEvaluation),
    )


def class_figures(counts: ClassCounts, names: Sequence[str] = ()) -> tuple[ClassFigures, ...]:
    """The figures of each class. `names` may be fewer than the classes."""
    return tuple(
        ClassFigures(
            name=names[number] if number < len(names) else None,
            labels=labels,
            correct=correct,
            accuracy=correct / labels if labels else None,
        )
        for number, (labels, correct) in enumerate(counts)
    )


def as_json(document: EvaluationDocument) -> str:
    """The document as indented JSON, with a line for each row of the confusion matrix."""
    content = json.loads(msgspec.json.encode(document))  # null in place of NaN and infinity
    rows = content.pop(CONFUSION)
    text = json.dumps(content, indent=1).removesuffix("\n}")
    matrix = "null"
    if rows is not None:
        matrix = "[\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n ]"
    return f'{text},\n "{CONFUSION}": {matrix}\n}}'


def read_evaluation(path: Path) -> EvaluationDocument | None:
    """Read the document at `path`; None for another document, such as a profile.

    Raises InputError if the document is damaged, or of a newer version.
    """
    try:
        data = path.read_bytes()
        content = decode_json(data, dict[str, object])
    except (OSError, MalformedError):
        return None  # it is reported when it is read as a profile
    if content.get("document") != "evaluation":
        return None
    version = content.get("version")
    if isinstance(version, int) and version > EVALUATION_VERSION:
        raise InputError(
            "{path} is an evaluation of version {found}; this program reads {supported}. Install "
            "the version of edgetailor that wrote it, or a later one.",
            code="evaluation.wrong-version",
            path=str(path),
            found=version,
            supported=EVALUATION_VERSION,
        )
    try:
        document = decode_json(data, EvaluationDocument)
    except MalformedError as error:
        raise _damaged(path, str(error)) from None
    problem = _misfit(document)
    if problem is not None:
        raise _damaged(path, problem)
    return document


def check_comparable(documents: Sequence[EvaluationDocument]) -> None:
    """Raise InputError unless all evaluations with classes have the same number of classes."""
    numbers = {len(document.classes) for document in documents if document.classes}
    if len(numbers) > 1:
        raise InputError(
            "The evaluations have different numbers of classes: {classes}. Compare models of the "
            "same classes.",
            code="evaluation.other-classes",
            classes=sorted(numbers),
        )


def _misfit(document: EvaluationDocument) -> str | None:
    """Why the parts of a document do not fit together; None if they do."""
    classes = len(document.classes or ())
    rows = document.confusion
    if rows is not None and any(len(row) != classes for row in (rows, *rows)):
        return f"`{CONFUSION}` must have a row and a column for each of the {classes} classes"
    worst = document.worst_class
    if worst is not None and not 0 <= worst < classes:
        return f"`worst_class` must be one of the {classes} classes"
    return None


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(
        "{path} is damaged: {reason}. Write it again with `edgetailor evaluate --json`.",
        code="evaluation.malformed",
        path=str(path),
        reason=reason,
    )
