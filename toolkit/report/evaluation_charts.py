"""Draws evaluations: bars with the accuracy of each class, and a confusion matrix."""

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import PercentFormatter

from toolkit.report.charts import (
    BUDGET,
    COLOURS,
    GRID,
    INK,
    MUTED,
    PAPER,
    WIDTH_IN,
    clipped,
    note,
    rows_of,
    save,
)
from toolkit.report.evaluation_document import EvaluationDocument

MOST_ROWS = 30
"""If there are more classes, only the FEW least accurate ones are drawn."""
FEW = 20
PALETTE = (COLOURS["forward"], COLOURS["backprop"], COLOURS["stages"], COLOURS["idle"])
"""The colour of each evaluation."""
ROW_IN, CELL_IN, BESIDES_IN = 0.3, 0.3, 1.2
OTHERS = "others"
NUMBERED = 5
"""The most digits of a count that has room in a cell."""


def drawn_classes(documents: Sequence[EvaluationDocument]) -> list[int]:
    """The classes to draw: all or a few. Classes far below the mean come first."""
    classes = len(documents[0].classes or ())
    if classes <= MOST_ROWS:
        return list(range(classes))

    def mean(number: int) -> float:
        known = [
            figures.accuracy
            for document in documents
            if (figures := (document.classes or ())[number]).accuracy is not None
        ]
        return sum(known) / len(known) if known else 2.0  # classes without labels are last

    worst = {document.worst_class for document in documents}
    return sorted(range(classes), key=lambda number: (number not in worst, mean(number)))[:FEW]


def draw_png(documents: Sequence[EvaluationDocument]) -> bytes:
    """Draw the accuracy of each class, and the confusion matrix of each evaluation, as a PNG."""
    shown = drawn_classes(documents)
    known = [document for document in documents if document.confusion is not None]
    heights = [bars_height(documents, shown), *(matrix_height(shown) for _ in known)]
    drawn = Figure(figsize=(WIDTH_IN, sum(heights)), dpi=144, facecolor=PAPER)
    drawn.set_layout_engine("constrained", w_pad=0.15, h_pad=0.15)
    bars, *matrices = drawn.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    draw_classes(bars, documents, shown)
    classes = len(documents[0].classes or ())
    few = "" if len(shown) == classes else f": the {len(shown)} least accurate of {classes:,}"
    bars.set_title(f"Accuracy by class{few}", loc="left", fontsize=11, color=INK)
    for axes, document in zip(matrices, known, strict=True):
        draw_confusion(axes, document, shown)
        title = f"Confusion matrix of {clipped(document.title, 70)}"
        axes.set_title(title, loc="left", fontsize=11, color=INK, parse_math=False)
    if len(documents) > 1:
        drawn.legend(
            handles=[
                Patch(color=colour, label=clipped(document.title, 60).replace("$", r"\$"))
                for colour, document in zip(PALETTE, documents, strict=False)
            ],
            loc="outside lower left", frameon=False, fontsize=9, labelcolor=INK,
        )  # fmt: skip
    png = io.BytesIO()
    save(drawn, png, format="png")
    return png.getvalue()


def class_bars(documents: Sequence[EvaluationDocument], shown: Sequence[int]) -> Figure:
    """A figure for a page with the accuracy of each class."""
    height = bars_height(documents, shown)
    drawn = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    draw_classes(drawn.add_subplot(), documents, shown)
    return drawn


def confusion_figure(document: EvaluationDocument, shown: Sequence[int]) -> Figure:
    """A figure for a page with the confusion matrix."""
    drawn = Figure(figsize=(WIDTH_IN, matrix_height(shown)), layout="constrained")
    draw_confusion(drawn.add_subplot(), document, shown)
    return drawn


def bars_height(documents: Sequence[EvaluationDocument], shown: Sequence[int]) -> float:
    """The height of the bars in inches."""
    return BESIDES_IN + ROW_IN * len(shown) * (1 + 0.5 * (len(documents) - 1))


def matrix_height(shown: Sequence[int]) -> float:
    """The height of a confusion matrix in inches."""
    return BESIDES_IN + CELL_IN * len(shown)


def draw_classes(axes: Axes, documents: Sequence[EvaluationDocument], shown: Sequence[int]) -> None:
    """Draw the accuracy of each class, a bar for each evaluation, and their means as lines."""
    class_rows(axes, documents[0], shown)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="x", color=GRID)
    width = 0.8 / len(documents)
    for number, (colour, document) in enumerate(zip(PALETTE, documents, strict=False)):
        for row, label in enumerate(shown):
            accuracy = (document.classes or ())[label].accuracy
            at = row + (number - (len(documents) - 1) / 2) * width
            worst = label == document.worst_class
            if accuracy is None:
                note(axes, 0, at, "no labels", MUTED, size=8)
                continue
            axes.barh(at, accuracy, 0.9 * width, color=colour)
            said = f"{accuracy:.1%}{', far below the mean' if worst else ''}"
            note(axes, accuracy, at, said, BUDGET if worst else INK, size=8)
        mean = document.mean_class_accuracy
        if mean is not None:
            axes.axvline(mean, color=colour, linestyle=(0, (4, 3)), linewidth=1.4, zorder=0)
    axes.set_xlabel("dashed: mean of the classes", color=MUTED, loc="left")


def draw_confusion(axes: Axes, document: EvaluationDocument, shown: Sequence[int]) -> None:
    """Draw the confusion matrix: rows are the true classes, and columns are the predicted classes.

    The colour of a cell is its share of the row's labels. If some classes are not shown, the last
    column has the sum of these classes.
    """
    matrix = document.confusion or ()
    heads = list(map(str, shown))
    rows = [[matrix[true][predicted] for predicted in shown] for true in shown]
    if len(shown) < len(matrix):
        heads.append(OTHERS)
        rows = [[*row, sum(matrix[true]) - sum(row)] for true, row in zip(shown, rows, strict=True)]
    class_rows(axes, document, shown)
    axes.set_xlim(-0.5, len(heads) - 0.5)
    axes.set_xticks(range(len(heads)), heads, fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0, labelrotation=90 if len(heads) > FEW else 0)
    for row, (true, counts) in enumerate(zip(shown, rows, strict=True)):
        labels = (document.classes or ())[true].labels
        for column, count in enumerate(counts):
            if not count:
                continue
            right = column < len(shown) and shown[column] == true
            colour = COLOURS["stages"] if right else COLOURS["backprop"]
            # Shares of a few percent must be visible, too.
            strength = 0.15 + 0.85 * count / max(labels, 1)
            cell = (column - 0.48, row - 0.48)
            axes.add_patch(Rectangle(cell, 0.96, 0.96, color=colour, alpha=strength, linewidth=0))
            said = str(count)
            if len(said) <= NUMBERED:
                size = 8 if len(heads) <= FEW + 1 and len(said) < 4 else 6
                axes.text(column, row, said, ha="center", va="center", fontsize=size, color=INK)
    axes.set_xlabel("predicted class", color=MUTED, loc="left")
    axes.xaxis.set_label_position("top")
    axes.set_ylabel("true class", color=MUTED)


def class_rows(axes: Axes, document: EvaluationDocument, shown: Sequence[int]) -> None:
    """Set up a row for each class, from the top."""
    rows_of(axes, [clipped(document.class_label(number), 24) for number in shown], fontsize=9)
