"""Draws curves of accuracy and loss of one simulation, or of several simulations."""

import statistics
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from device_agent.formats.atomic_files import stream_file
from toolkit.simulation.comparison import Row, sent_bytes, simulated_times
from toolkit.simulation.results import RoundResult

# Okabe and Ito's palette: people with any kind of colour blindness can tell these apart.
BLUE, ORANGE, GREEN, SKY = "#0072B2", "#D55E00", "#009E73", "#56B4E9"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", SKY, "#000000")


def draw_curves(history: Sequence[RoundResult], to: Path) -> None:
    """Write a PNG with the accuracy, if there is one, and the loss of each round.

    If every round has a simulated time, a second pair of curves has this time on its x axis.
    """
    accuracies = [result.accuracy for result in history if result.accuracy is not None]
    spans = [result.simulated_s for result in history if result.simulated_s is not None]
    unit, name = time_unit(sum(spans))
    axes = [("round", [float(result.round) for result in history])]
    if len(spans) == len(history):
        axes.append((f"simulated time in {name}", [*accumulate(span / unit for span in spans)]))
    figure = Figure(figsize=(9, 3.6 * len(axes)), dpi=120, layout="constrained")
    rows = figure.subplots(len(axes), 2 if accuracies else 1, squeeze=False)
    for panels, (label, along) in zip(rows, axes, strict=True):
        if accuracies:
            panels[0].plot(along, accuracies, color=BLUE)
            panels[0].set(ylim=(0, 1), title="Accuracy on held-out samples")
            in_percent(panels[0])
        panels[-1].plot(along, [result.loss for result in history], color=ORANGE)
        panels[-1].set(title="Loss on held-out samples")
        for panel in panels:
            panel.set_xlabel(label)
            panel.grid(alpha=0.3)
    for panel in rows[0]:
        by_round(panel)
    stream_file(to, lambda file: figure.savefig(file, format="png"))


def draw_comparison(rows: Sequence[Row], to: Path, target: float | None = None) -> None:
    """Write a PNG with a curve for each row: the mean of its runs, and their range.

    A second panel has a curve for each run over the bytes of all clients. A third panel is over the
    simulated time, if every round has one. A dashed line shows `target`.
    """
    sent: list[list[Sequence[float]]] = [[*map(sent_bytes, row.histories)] for row in rows]
    along = [("MB of all clients", 1_000_000, sent)]
    if all(row.simulated_s is not None for row in rows):
        times: list[list[Sequence[float]]] = [
            [*map(simulated_times, row.histories)] for row in rows
        ]
        unit, name = time_unit(max(run[-1] for runs in times for run in runs))
        along.append((f"simulated time in {name}", unit, times))
    figure = Figure(figsize=(8, 4.5 * (1 + len(along))), dpi=120, layout="constrained")
    panels = figure.subplots(1 + len(along), squeeze=False)[:, 0]
    for number, row in enumerate(rows):
        style = ("-", "--", ":")[number // len(COLOURS) % 3]
        curves = [row.scores(history) for history in row.histories]
        line = {"color": COLOURS[number % len(COLOURS)], "linestyle": style}
        draw_range(panels[0], curves, 1, label=row.name, **line)
        for panel, (_, unit, positions) in zip(panels[1:], along, strict=True):
            for scores, run in zip(curves, positions[number], strict=True):
                panel.plot([value / unit for value in run], scores, **line)
    by_loss = any(row.judged_by_loss for row in rows)
    panels[0].set(title=f"{'Loss' if by_loss else 'Accuracy'} on held-out samples")
    for panel, label in zip(panels, ["round", *(label for label, *_ in along)], strict=True):
        panel.set_xlabel(label)
        if not by_loss:
            in_percent(panel)
        if target is not None:
            panel.axhline(target, color="#000000", linestyle="--", linewidth=0.8)
        panel.grid(alpha=0.3)
    by_round(panels[0])
    panels[0].legend(fontsize="small")
    stream_file(to, lambda file: figure.savefig(file, format="png"))


def draw_range(axes: Axes, curves: Sequence[Sequence[float]], first: int, **style: Any) -> None:
    """Draw the mean of `curves` and their range. The curves begin with the round `first`."""
    rounds = range(first, first + min(map(len, curves)))
    values = list(zip(*curves, strict=False))
    axes.plot(rounds, [*map(statistics.fmean, values)], **style)
    low, high = [*map(min, values)], [*map(max, values)]
    axes.fill_between(rounds, low, high, color=style["color"], alpha=0.14, linewidth=0)


def by_round(axes: Axes) -> None:
    """Label only whole numbers on the x axis, which shows rounds."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def in_percent(axes: Axes) -> None:
    """Label accuracies in percent."""
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def time_unit(seconds: float) -> tuple[int, str]:
    """The unit of an axis of length `seconds`: the seconds of the unit, and its name."""
    if seconds < 120:
        return 1, "seconds"
    return (60, "minutes") if seconds < 7200 else (3600, "hours")
