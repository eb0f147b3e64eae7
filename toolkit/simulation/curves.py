"""Accuracy and loss by round and by simulated time, as one picture."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from device_agent.formats.atomic_files import stream_file
from toolkit.simulation.results import RoundResult

BLUE, ORANGE = "#0072B2", "#D55E00"


def draw_curves(history: Sequence[RoundResult], to: Path) -> None:
    """Write a PNG with the accuracy, if there is one, and the loss of each round.

    If every round has a simulated time, a second pair of curves is by simulated time.
    """
    accuracies = [one.accuracy for one in history if one.accuracy is not None]
    spans = [one.simulated_s for one in history if one.simulated_s is not None]
    unit, name = _unit(sum(spans))
    axes = [("round", [float(one.round) for one in history])]
    if len(spans) == len(history):
        axes.append((f"simulated time in {name}", [*accumulate(span / unit for span in spans)]))
    figure = Figure(figsize=(9, 3.6 * len(axes)), dpi=120, layout="constrained")
    rows = figure.subplots(len(axes), 2 if accuracies else 1, squeeze=False)
    for panels, (label, along) in zip(rows, axes, strict=True):
        if accuracies:
            panels[0].plot(along, accuracies, color=BLUE)
            panels[0].set(ylim=(0, 1), title="Accuracy on held-out samples")
            panels[0].yaxis.set_major_formatter(PercentFormatter(1))
        panels[-1].plot(along, [one.loss for one in history], color=ORANGE)
        panels[-1].set(title="Loss on held-out samples")
        for panel in panels:
            panel.set_xlabel(label)
            panel.grid(alpha=0.3)
    for panel in rows[0]:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    stream_file(to, lambda file: figure.savefig(file, format="png"))


def _unit(seconds: float) -> tuple[int, str]:
    """The unit of an axis as long as `seconds`: its seconds and its name."""
    if seconds < 120:
        return 1, "seconds"
    return (60, "minutes") if seconds < 7200 else (3600, "hours")
