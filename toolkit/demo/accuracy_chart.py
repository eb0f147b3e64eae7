"""The accuracy curve as a picture."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from toolkit.demo.demo_result import DemoResult

BLUE = "#1f5fa8"


def draw(result: DemoResult, to: Path) -> None:
    """Write accuracy over rounds as the PNG file `to`."""
    figure = Figure(figsize=(8, 4.5), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    points = [(r.round, r.accuracy) for r in result.history if r.accuracy is not None]
    rounds, accuracies = zip(*points, strict=True)
    axes.plot(rounds, accuracies, color=BLUE, marker="o", markersize=5)
    axes.annotate(
        f"{result.accuracy:.1%}",
        (result.rounds, result.accuracy),
        (0, -18),
        textcoords="offset points",
        ha="center",
        color=BLUE,
        weight="bold",
    )
    axes.set(xlabel="round (0: before training)", ylabel="accuracy", ylim=(0, 1.04))
    axes.set_title(title(result), loc="left", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, format="png")


def title(result: DemoResult) -> str:
    """What the curve shows: judged on what, trained by whom."""
    submodels = ", ".join(dict.fromkeys(device.submodel for device in result.devices))
    return (
        f"Global model on {result.held_out_samples} held-out digits\n"
        f"{len(result.devices)} devices: {submodels}; seed {result.seed}"
    )
