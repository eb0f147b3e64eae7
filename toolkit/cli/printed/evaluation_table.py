"""The output of `edgetailor evaluate`: figures, and a table of classes with a confusion matrix."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import click
from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from device_agent.formats.class_counts import (
    ClassCounts,
    class_accuracies,
    mean_of_classes,
    worst_class,
)
from device_agent.formats.evaluation_counts import MOST_CLASSES
from device_agent.formats.protocol.fleet import further_text
from profiles.text_formatting import counted
from toolkit.terminal_output import print_table, table

if TYPE_CHECKING:
    from toolkit.report.evaluation_document import EvaluationDocument

WIDTH = 80
"""The confusion matrix is printed if it fits into this number of columns."""
NAME = 24
"""The most columns for the name of a class."""
ROWS = 20
"""If there are more classes, only the LOWEST least accurate ones are printed."""
LOWEST = 10
LARGE = 1e6
"""A loss of this size or more is printed with an exponent."""
MISTAKES = 3
"""If no matrix is printed, how many wrong classes are printed for each class."""


def show_evaluation(document: "EvaluationDocument") -> None:
    """Print the figures, and the figures of each class."""
    click.echo(figures_line(document))
    if document.classes is None:
        if document.accuracy is not None and not document.judged_by_devices:
            click.echo(f"no figures by class: there are more than {MOST_CLASSES:,}")
        return
    click.echo()
    matrix = matrix_table(document)
    if matrix is not None:
        print_table(matrix)
        click.echo(".: 0; rows are the true classes, columns 0, 1, ... the predicted ones")
    else:
        shown = shown_classes(document)
        print_table(class_table(document, shown, NAME))
        if len(shown) < len(document.classes):
            click.echo(
                f"The {len(shown)} least accurate of {len(document.classes):,} classes; --json "
                "has all."
            )
    for line in remarks(document):
        click.echo(line)


def show_evaluations(documents: Sequence["EvaluationDocument"]) -> None:
    """Print one evaluation, or several side by side."""
    if len(documents) == 1:
        show_evaluation(documents[0])
        return
    for number, document in enumerate(documents, 1):
        click.echo(f"{number}: {clipped(document.title, NAME * 2)}: {figures_line(document)}")
    with_classes = [number for number, document in enumerate(documents) if document.classes]
    if with_classes:
        click.echo()
        names = {str(number + 1): documents[number].classes or () for number in with_classes}
        show_classes_compared(
            documents[with_classes[0]].class_label,
            {
                name: [(figures.labels, figures.correct) for figures in classes]
                for name, classes in names.items()
            },
        )


def show_classes_compared(
    class_label: Callable[[int], str], counts: Mapping[str, ClassCounts], difference: bool = True
) -> None:
    """Print the accuracy of each class side by side.

    Args:
        class_label: The name of a class by its number.
        counts: The counts of each class by the name of their column.
        difference: Whether another column has the difference between the last of these columns
            and the first.
    """
    accuracies = [class_accuracies(own) for own in counts.values()]
    classes = min(map(len, accuracies))
    numbers = list(range(classes))
    if classes > ROWS:
        means: dict[int, float] = {}
        for number in numbers:
            known = [own[number] for own in accuracies]
            shares = [share for share in known if share is not None]
            if shares:
                means[number] = sum(shares) / len(shares)
        numbers = sorted(means, key=means.__getitem__)[:LOWEST]
    rows = table("class", *(clipped(name, NAME) for name in counts), *["difference"] * difference)
    for number in numbers:
        own = [accuracy[number] for accuracy in accuracies]
        rows.add_row(Text(clipped(class_label(number), NAME)), *shown_shares(own, difference))
    means_of_all = [mean_of_classes(own) for own in counts.values()]
    rows.add_row("mean", *shown_shares(means_of_all, difference))
    print_table(rows)
    if classes > ROWS:
        click.echo(f"The {len(numbers)} least accurate of {classes:,} classes.")
    for name, own_counts in counts.items():
        worst = worst_class(own_counts)
        if worst is not None:
            label = clipped(class_label(worst), NAME)
            click.echo(f"worst class ({clipped(name, NAME)}): {label}, far below the mean")


def shown_shares(shares: Sequence[float | None], difference: bool) -> list[str]:
    """Shares in percent. With `difference`, the last minus the first is appended, in points."""
    cells = ["" if share is None else f"{share:.1%}" for share in shares]
    if not difference:
        return cells
    first, last = shares[0], shares[-1]
    if first is None or last is None:
        return [*cells, ""]
    return [*cells, f"{100 * (last - first):+.1f}"]


def figures_line(document: "EvaluationDocument") -> str:
    """The figures over all samples."""
    samples = counted(document.samples, "sample")
    if document.counted != document.samples:
        samples = f"{counted(document.counted, 'label')} of {samples}"
    loss = "not finite"
    if document.loss is not None:
        loss = f"{document.loss:.4f}" if document.loss < LARGE else f"{document.loss:.4g}"
    accuracy = "" if document.accuracy is None else f"accuracy {document.accuracy:.1%}, "
    return f"{accuracy}loss {loss}{further_text(document)} on {samples}"


def remarks(document: "EvaluationDocument") -> Iterable[str]:
    """Yield the mean of the classes, the class that is far below it, and classes without labels."""
    classes, mean = document.classes or (), document.mean_class_accuracy
    if mean is None:
        return
    yield f"mean of the classes: {mean:.1%}"
    if document.worst_class is not None:
        worst = classes[document.worst_class]
        yield (
            f"worst class: {clipped(document.class_label(document.worst_class), NAME)}, far below "
            f"the mean: {worst.accuracy:.1%} of {counted(worst.labels, 'label')}"
        )
    empty = sum(not figures.labels for figures in classes)
    if empty:
        yield f"{empty:,} class{'' if empty == 1 else 'es'} without labels"


def shown_classes(document: "EvaluationDocument") -> list[int]:
    """The classes to print where no confusion matrix is printed.

    These are all classes. If there are more than ROWS, these are the LOWEST least accurate classes.
    """
    classes = document.classes or ()
    if len(classes) <= ROWS:
        return list(range(len(classes)))
    known = [
        (figures.accuracy, -figures.labels, number)
        for number, figures in enumerate(classes)
        if figures.accuracy is not None
    ]
    return [number for _, _, number in sorted(known)[:LOWEST]]


def matrix_table(document: "EvaluationDocument") -> Table | None:
    """A table of all classes with the confusion matrix; None if it is unknown or too large."""
    every = range(len(document.classes or ()))
    if document.confusion is None or len(every) > ROWS:
        return None
    tables = (class_table(document, every, name, matrix=True) for name in (NAME, NAME // 2))
    return next((rows for rows in tables if width_of(rows) <= WIDTH), None)


def class_table(
    document: "EvaluationDocument", shown: Iterable[int], name: int, matrix: bool = False
) -> Table:
    """A table with a row for each class of `shown`, and their confusions if they are known.

    Names of classes take at most `name` columns.
    """
    classes, confusion = document.classes or (), document.confusion
    numbers = [] if confusion is None else ["taken for"]
    if matrix:
        numbers = [str(number) for number in range(len(classes))]
    rows = table("class", "labels", "accuracy", *numbers)
    if numbers == ["taken for"]:
        rows.columns[-1].justify = "left"
    for number in shown:
        figures = classes[number]
        cells: list[str | Text] = []
        if confusion is not None:
            counts: list[str | Text] = [str(n) if n else "." for n in confusion[number]]
            cells = counts if matrix else [Text(mistakes(document, number))]
        rows.add_row(
            Text(clipped(document.class_label(number), name)),
            str(figures.labels),
            "" if figures.accuracy is None else f"{figures.accuracy:.1%}",
            *cells,
        )
    return rows


def mistakes(document: "EvaluationDocument", number: int) -> str:
    """The classes that are most often predicted for labels of class `number`, with counts."""
    row = (document.confusion or ())[number]
    # If all classes are listed, their numbers are enough.
    label = str if len(row) <= ROWS else document.class_label
    wrong = sorted((-count, other) for other, count in enumerate(row) if count and other != number)
    return ", ".join(
        f"{clipped(label(other), NAME // 2)} ({-count})" for count, other in wrong[:MISTAKES]
    )


def clipped(text: str, columns: int) -> str:
    """`text` cut to at most `columns` terminal columns; some letters take two columns."""
    if cell_len(text) <= columns:
        return text
    return f"{set_cell_size(text, columns - 1).rstrip()}\N{HORIZONTAL ELLIPSIS}"


def width_of(rows: Table) -> int:
    """The columns of a terminal that a table takes."""
    cells = [[str(column.header), *map(str, column.cells)] for column in rows.columns]
    return sum(max(map(cell_len, column)) for column in cells) + 2 * len(cells) - 2
