"""Writes the page of one or several evaluations: figures, classes, confusions and devices."""

from collections.abc import Iterable, Sequence
from html import escape

from device_agent.formats.protocol.fleet import KindEvaluation, further_figures
from profiles.text_formatting import counted
from toolkit.report.charts import THEMED
from toolkit.report.evaluation_charts import (
    PALETTE,
    class_bars,
    confusion_figure,
    drawn_classes,
)
from toolkit.report.evaluation_document import EvaluationDocument
from toolkit.report.html_page import framed, picture, section, table

CLASSES_NOTE = (
    "How many of the labels of each class are predicted correctly, on samples that no training "
    "uses. A class is marked if its accuracy is more than 10 points below the mean of the classes "
    "and chance is an unlikely cause."
)
CONFUSION_NOTE = (
    "Rows are the true classes, columns the predicted ones: correct predictions are green, the "
    "others orange, and stronger if they are a larger share of the row."
)
DEVICES_NOTE = (
    "How the devices judge the model on samples that they never train on, as they received it and "
    "after their local training. The figures of all devices and of each kind pool the samples. In "
    "the mean of devices, each device counts once."
)


def evaluation_page(documents: Sequence[EvaluationDocument]) -> str:
    """Write evaluations of one or several models as an HTML document.

    Args:
        documents: The evaluations. If several have classes, they have the same number of classes.

    Returns:
        The document. It needs no other file.
    """
    title = "How good the model is" if len(documents) == 1 else "How good the models are"
    with_classes = [document for document in documents if document.classes]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=under>{escape('; '.join(document.title for document in documents))}</p>",
        *warnings(documents),
        section(
            "All samples" if any(d.judged_by_devices for d in documents) else "Held-out data",
            "",
            figures_table(documents),
        ),
        *(class_sections(with_classes) if with_classes else ()),
        *(device_section(document) for document in documents if document.devices),
    ]
    return framed(title, parts)


def warnings(documents: Sequence[EvaluationDocument]) -> Iterable[str]:
    """Yield HTML that names a class far below the mean."""
    for document in documents:
        if document.worst_class is not None:
            worst = (document.classes or ())[document.worst_class]
            name = document.class_label(document.worst_class)
            said = (
                f"{document.title}: class {name} is far below the mean of the classes: "
                f"{percent(worst.accuracy)} of {counted(worst.labels, 'label')}, the mean is "
                f"{percent(document.mean_class_accuracy)}."
            )
            yield f"<p class=warning>{escape(said)}</p>"


def figures_table(documents: Sequence[EvaluationDocument]) -> str:
    """HTML of a table with the figures over all samples; columns without figures are left out."""
    columns = {
        "samples": [f"{document.samples:,}" for document in documents],
        "labels": [f"{document.counted:,}" for document in documents],
        "accuracy": [percent(document.accuracy) for document in documents],
        "mean of classes": [percent(document.mean_class_accuracy) for document in documents],
        "loss": [number(document.loss) for document in documents],
    }
    further = [further_figures(document) for document in documents]
    for name in dict.fromkeys(name for own in further for name in own):
        columns[name] = [number(own.get(name)) for own in further]
    known = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [
        [document.title, *(cells[row] for cells in known.values())]
        for row, document in enumerate(documents)
    ]
    return table("All samples", ["model", *known], rows)


def class_sections(documents: Sequence[EvaluationDocument]) -> Iterable[str]:
    """Yield HTML of the accuracy of each class, and of the confusion matrices."""
    shown = drawn_classes(documents)
    classes = len(documents[0].classes or ())
    text = CLASSES_NOTE
    if len(shown) < classes:
        text += f" The {len(shown)} least accurate of {classes:,} classes."
    bars = picture(class_bars(documents, shown), "classes", "Bars with the accuracy of each class")
    yield section("By class", text, legend(documents), bars, class_table(documents, shown))
    for position, document in enumerate(documents):
        if document.confusion is None:
            continue
        title = "Confusion matrix" if len(documents) == 1 else f"Confusions of {document.title}"
        described = "Confusion matrix; each cell has its number of labels"
        drawn = picture(confusion_figure(document, shown), f"confusion-{position}", described)
        yield section(title, CONFUSION_NOTE, drawn)


def legend(documents: Sequence[EvaluationDocument]) -> str:
    """The colour of each evaluation; empty for a single evaluation."""
    if len(documents) == 1:
        return ""
    items = (
        f"<li><i style='background:var(--{THEMED[colour]})'></i>{escape(document.title)}</li>"
        for colour, document in zip(PALETTE, documents, strict=False)
    )
    return f"<ul class=legend>{''.join(items)}</ul>"


def class_table(documents: Sequence[EvaluationDocument], shown: Sequence[int]) -> str:
    """HTML of a table with labels and accuracy of each class, also on the devices if known."""
    head = ["class"]
    columns: list[list[str]] = []
    for position, document in enumerate(documents, 1):
        which = "" if len(documents) == 1 else f" {position}"
        figures = [(document.classes or ())[number] for number in shown]
        columns.append([f"{own.labels:,}" for own in figures])
        columns.append([percent(own.accuracy) for own in figures])
        head += [f"labels{which}", f"accuracy{which}"]
        devices = document.devices and document.devices.classes
        if (
            not document.judged_by_devices
            and devices
            and len(devices) == len(document.classes or ())
        ):
            pairs = [devices[number] for number in shown]
            columns.append([f"{labels:,}" for labels, _ in pairs])
            columns.append([percent(right / of if of else None) for of, right in pairs])
            head += [f"labels on devices{which}", f"accuracy on devices{which}"]
    names = [documents[0].class_label(number) for number in shown]
    return table("Labels and accuracy", head, zip(names, *columns, strict=True))


def device_section(document: EvaluationDocument) -> str:
    """HTML of the judgement of the devices."""
    judged = document.devices
    assert judged is not None
    further = list(further_figures(judged))
    mean = figures(judged.mean_accuracy, judged.mean_loss)
    worst = figures(judged.worst_accuracy, judged.worst_loss)
    rows = [
        pooled_row("all devices", judged, further),
        ["mean of devices", "", "", *mean, "", "", *([""] * len(further))],
        ["worst tenth", "", "", *worst, "", "", *([""] * len(further))],
        *(pooled_row(f"kind {name}", kind, further) for name, kind in judged.kinds.items()),
    ]
    trained = ["accuracy trained", "loss trained"]
    head = ["", "devices", "labels", "accuracy", "loss", *trained, *further]
    title = f"On the devices: {document.title}"
    # A regression has no accuracies.
    used = [column for column in range(len(head)) if not column or any(row[column] for row in rows)]
    shown = [[row[column] for column in used] for row in rows]
    drawn = table("Federated evaluation", [head[column] for column in used], shown)
    return section(title, DEVICES_NOTE, drawn)


def pooled_row(name: str, pooled: KindEvaluation, further: Iterable[str]) -> list[str]:
    """The row of all devices or of a kind, with a cell for each of the figures `further`."""
    known = further_figures(pooled)
    return [
        name,
        f"{pooled.devices:,}",
        f"{pooled.counted:,}",
        *figures(pooled.accuracy, pooled.loss),
        *figures(pooled.trained_accuracy, pooled.trained_loss),
        *(number(known.get(other)) for other in further),
    ]


def figures(accuracy: float | None, loss: float | None) -> tuple[str, str]:
    """Accuracy and loss as text."""
    return percent(accuracy), number(loss)


def percent(share: float | None) -> str:
    """A share in percent; empty if it is not known."""
    return "" if share is None else f"{share:.1%}"


def number(value: float | None) -> str:
    """A loss or an error; empty if it is not known."""
    return "" if value is None else f"{value:.4g}"
