"""Accuracy and loss by round, as one picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from toolkit.simulation.results import RoundResult

BLUE, ORANGE = "#0072B2", "#D55E00"


def draw_curves(history: Sequence[RoundResult], to: Path) -> None:
    """Write a PNG with the accuracy, if there is one, and the loss of each round."""
    rounds = [one.round for one in history]
    accuracies = [one.accuracy for one in history if one.accuracy is not None]
    figure = Figure(figsize=(9, 3.6), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2 if accuracies else 1, squeeze=False)[0]
    if accuracies:
        panels[0].plot(rounds, accuracies, color=BLUE)
        panels[0].set(ylim=(0, 1), title="Accuracy on held-out samples")
        panels[0].yaxis.set_major_formatter(PercentFormatter(1))
    panels[-1].plot(rounds, [one.loss for one in history], color=ORANGE)
    panels[-1].set(title="Loss on held-out samples")
    for panel in panels:
        panel.set_xlabel("round")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    figure.savefig(to, format="png")
