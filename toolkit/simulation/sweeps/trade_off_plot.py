"""Draws the results of a sweep over their costs, with the Pareto front."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from device_agent.formats.atomic_files import stream_file
from toolkit.simulation.curves import BLUE, ORANGE, in_percent, time_unit
from toolkit.simulation.sweeps.trade_offs import Cost, Point, front

PLOT = "trade-off.png"


def draw_trade_off(points: Sequence[Point], to: Path) -> None:
    """Write a PNG with the score of each point over its bytes, and the Pareto front.

    Further panels are over the memory of a device and over simulated time, if all points have them.
    Points are numbered from 1 in the order of `points`.
    """
    time, name = time_unit(max(point.costs.get("simulated_s", 0) for point in points))
    axes: list[tuple[Cost, float, str]] = [
        ("bytes", 1e6, "MB of all clients"),
        ("memory", 1e6, "MB of memory of a device, at most"),
        ("simulated_s", time, f"simulated time in {name}"),
    ]
    known = [own for own in axes if all(own[0] in point.costs for point in points)]
    by_loss = any(point.row.judged_by_loss for point in points)
    figure = Figure(figsize=(8, 4.5 * len(known)), dpi=120, layout="constrained")
    panels = figure.subplots(len(known), squeeze=False)[:, 0]
    for panel, (cost, unit, label) in zip(panels, known, strict=True):
        best = front(points, cost)
        panel.plot(
            *zip(*((own.costs[cost] / unit, own.score.mean) for own in best), strict=True),
            color=ORANGE,
            marker="o",
            markersize=11,
            markerfacecolor="none",
            label="best for its cost",
        )
        for number, point in enumerate(points, 1):
            place = point.costs[cost] / unit, point.score.mean
            panel.errorbar(*place, yerr=point.score.deviation or 0, color=BLUE, marker="o")
            panel.annotate(str(number), place, (7, 7), textcoords="offset points")
        panel.set_xlabel(label)
        panel.margins(0.1)
        if not by_loss:
            in_percent(panel)
        panel.grid(alpha=0.3)
    panels[0].set(title=f"{'Loss' if by_loss else 'Accuracy'} of the last rounds by cost")
    panels[0].legend(fontsize="small")
    stream_file(to, lambda file: figure.savefig(file, format="png"))
