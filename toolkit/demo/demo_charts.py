"""The demo in one picture: accuracy by round, memory by submodel, traffic by device."""

from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiles.text_formatting import NOT_MEASURABLE, counted
from toolkit.demo import demo_settings
from toolkit.demo.demo_result import DemoResult
from toolkit.report.charts import GRID, INK, MUTED, note, plain
from toolkit.simulation.curves import BLUE, GREEN, ORANGE, SKY, by_round, draw_range, in_percent

SIZE_IN = (15.0, 5.4)
ROOM = 1.3
"""A panel of bars is this many times as wide as its longest bar, with room for the figures."""


def draw(result: DemoResult, to: Path) -> None:
    """Write the three charts of a demo as one PNG.

    Args:
        result: The demo's figures.
        to: The PNG file to write.
    """
    figure = Figure(figsize=SIZE_IN, dpi=144, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.14, wspace=0.04)
    figure.suptitle(title(result), x=0.012, ha="left", fontsize=14, weight="bold", color=INK)
    accuracy, memory, traffic = figure.subplots(1, 3, width_ratios=(1.25, 1, 1.1))
    draw_accuracy(accuracy, result)
    draw_memory(memory, result)
    draw_traffic(traffic, result)
    figure.savefig(to, format="png")


def title(result: DemoResult) -> str:
    """The title of the picture: number of devices, submodels and seed."""
    submodels = ", ".join(dict.fromkeys(device.submodel for device in result.devices))
    return f"{len(result.devices)} devices train one model: {submodels} (seed {result.seed})"


def draw_accuracy(axes: Axes, result: DemoResult) -> None:
    """Draw the held-out accuracy of the fleet and of the baselines, by round."""
    alone, full = list(result.baselines.alone.values()), result.baselines.all_full
    mean = fmean(curve[-1] for curve in alone)
    draw_range(
        axes, alone, 0, color=ORANGE, linestyle=(0, (1, 1.2)), linewidth=2.2,
        label=f"each device alone: mean {mean:.1%}\n(band: lowest to highest device)",
    )  # fmt: skip
    if full is not None:
        draw_range(
            axes, [full], 0, color=INK, linestyle=(0, (5, 2)), linewidth=1.6,
            label=f"all devices full: {full[-1]:.1%}",
        )  # fmt: skip
    name = "all devices full" if result.all_full else "mixed fleet"
    known = [(e.round, e.accuracy) for e in result.history if e.accuracy is not None]
    axes.plot(
        *zip(*known, strict=True), color=BLUE, marker="o", markersize=4.5, linewidth=2.2,
        label=f"{name}: {result.accuracy:.1%}",
    )  # fmt: skip
    heading(
        axes,
        "Accuracy",
        f"of the global model, or of each device's own,\n"
        f"on {result.held_out_samples} held-out digits",
    )
    axes.set(ylim=(0, 1.03), xlim=(-0.3, result.rounds + 0.3))
    axes.set_xlabel("round (0: before training)", color=INK)
    by_round(axes)
    in_percent(axes)
    axes.grid(color=GRID)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="lower right", fontsize=9.5, labelcolor=INK,
        facecolor="white", edgecolor="none", framealpha=1.0,
    )  # fmt: skip


def draw_memory(axes: Axes, result: DemoResult) -> None:
    """Draw the memory peaks of training submodels of a larger model.

    The memory of an agent that does not train is subtracted.
    """
    under = (
        "above the idle agent, measured;\n"
        f"{demo_settings.LARGER_NAME}, batch {demo_settings.LARGER_BATCH}"
    )
    heading(axes, "Peak memory of training", under)
    names = [memory.submodel for memory in result.larger_model]
    peaks = [(memory.above_idle_bytes or 0) / 1e6 for memory in result.larger_model]
    axes.barh(names, peaks, 0.6, color=GREEN)
    whole = peaks[0] if names and names[0] == "full" else 0.0
    for row, peak in enumerate(peaks):
        share = f" ({peak / whole:.0%})" if whole and row else ""
        note(axes, peak, row, f"{peak:.1f}{share}" if peak else NOT_MEASURABLE, INK)
    bars(axes, max(peaks, default=0.0))


def draw_traffic(axes: Axes, result: DemoResult) -> None:
    """Draw the bytes that each device received and sent in all rounds together."""
    heading(axes, "Traffic by device", f"sum of {counted(result.rounds, 'round')}")
    names = [f"{device.name}\n{device.submodel}" for device in result.devices]
    received = [device.bytes_down / 1e6 for device in result.devices]
    sent = [device.bytes_up / 1e6 for device in result.devices]
    rows = range(len(names))
    axes.barh([row - 0.2 for row in rows], received, 0.36, color=SKY, label="received")
    axes.barh([row + 0.2 for row in rows], sent, 0.36, color=BLUE, label="sent")
    for row in rows:
        note(axes, received[row], row - 0.2, f"{received[row]:.2f}", INK, size=8)
        note(axes, sent[row], row + 0.2, f"{sent[row]:.2f}", INK, size=8)
    axes.set_yticks(list(rows), names)
    bars(axes, max([*received, *sent], default=0.0))
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=9.5, frameon=False,
        labelcolor=INK, handlelength=1.0, columnspacing=1.0, borderaxespad=0.2,
    )  # fmt: skip


def heading(axes: Axes, text: str, under: str) -> None:
    """Set a panel's title, the explanation below it and the common style."""
    plain(axes)
    # Room for two lines in every panel, so that the titles are level.
    axes.set_title(text, loc="left", fontsize=12, weight="bold", color=INK, pad=36)
    axes.annotate(
        under, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points",
        fontsize=9.5, color=MUTED,
    )  # fmt: skip
    axes.tick_params(labelcolor=INK, length=0)


def bars(axes: Axes, longest: float) -> None:
    """Style the axes of horizontal bars in MB, with the first bar on top."""
    axes.invert_yaxis()
    axes.set_xlim(0, ROOM * longest or 1)
    axes.set_xlabel("MB", color=INK)
    axes.grid(axis="x", color=GRID)
