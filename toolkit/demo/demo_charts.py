"""The demo in one picture: accuracy by round, memory by submodel, traffic by device."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from profiles.text_formatting import counted
from toolkit.demo import demo_settings
from toolkit.demo.demo_result import DemoResult

# Okabe and Ito's palette: people with any kind of colour blindness can tell these apart.
BLUE, ORANGE, SKY, GREEN = "#0072B2", "#D55E00", "#56B4E9", "#009E73"
INK, MUTED, GRID = "#1c2430", "#5b6676", "#e3e7ec"
SIZE_IN = (15.0, 5.4)
ROOM = 1.3
"""Width of a panel of bars over its longest bar: figures stand behind the bars."""


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
    """Who trained what, with which seed."""
    submodels = ", ".join(dict.fromkeys(device.submodel for device in result.devices))
    return f"{len(result.devices)} devices train one model: {submodels} (seed {result.seed})"


def draw_accuracy(axes: Axes, result: DemoResult) -> None:
    """Held-out accuracy of the fleet and of what it is compared with, by round."""
    name = "all devices full" if result.all_full else "mixed fleet"
    rounds = [entry.round for entry in result.history]
    lowest, mean, highest = result.baselines.alone_range
    each = range(len(mean))
    axes.fill_between(each, lowest, highest, color=ORANGE, alpha=0.16, linewidth=0)
    axes.plot(
        each, mean, color=ORANGE, linestyle=(0, (1, 1.2)), linewidth=2.2,
        label=f"each device alone: mean {mean[-1]:.1%}\n(band: lowest to highest device)",
    )  # fmt: skip
    if result.baselines.all_full is not None:
        full = result.baselines.all_full
        axes.plot(
            range(len(full)), full, color=INK, linestyle=(0, (5, 2)), linewidth=1.6,
            label=f"all devices full: {full[-1]:.1%}",
        )  # fmt: skip
    points = [(r, e.accuracy) for r, e in zip(rounds, result.history, strict=True)]
    axes.plot(
        *zip(*[(r, a) for r, a in points if a is not None], strict=True),
        color=BLUE, marker="o", markersize=4.5, linewidth=2.2,
        label=f"{name}: {result.accuracy:.1%}",
    )  # fmt: skip
    heading(
        axes,
        "Accuracy",
        f"of the global model, or of each device's own,\n"
        f"on {result.held_out_samples} held-out digits",
    )
    axes.set(ylim=(0, 1.03), xlim=(-0.3, rounds[-1] + 0.3))
    axes.set_xlabel("round (0: before training)", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(color=GRID)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="lower right", fontsize=9.5, labelcolor=INK,
        facecolor="white", edgecolor="none", framealpha=1.0,
    )  # fmt: skip


def draw_memory(axes: Axes, result: DemoResult) -> None:
    """Peaks of training above the idle agent, on a model larger than the demo's."""
    under = (
        "above the idle agent, measured;\n"
        f"{demo_settings.LARGER_NAME}, batch {demo_settings.LARGER_BATCH}"
    )
    heading(axes, "Peak memory of training", under)
    names = [one.submodel for one in result.larger_model]
    peaks = [(one.above_idle_bytes or 0) / 1e6 for one in result.larger_model]
    axes.barh(names, peaks, 0.6, color=GREEN)
    whole = peaks[0] if names and names[0] == "full" else 0.0
    for row, (one, peak) in enumerate(zip(result.larger_model, peaks, strict=True)):
        share = f" ({peak / whole:.0%})" if whole and row else ""
        beside(axes, peak, row, f"{peak:.1f}{share}" if one.above_idle_bytes else "not measurable")
    bars(axes, "MB", max(peaks, default=0.0))


def draw_traffic(axes: Axes, result: DemoResult) -> None:
    """What each device received and sent in all rounds together."""
    heading(axes, "Traffic by device", f"sum of {counted(result.rounds, 'round')}")
    names = [f"{device.name}\n{device.submodel}" for device in result.devices]
    received = [device.bytes_down / 1e6 for device in result.devices]
    sent = [device.bytes_up / 1e6 for device in result.devices]
    rows = range(len(names))
    axes.barh([row - 0.2 for row in rows], received, 0.36, color=SKY, label="received")
    axes.barh([row + 0.2 for row in rows], sent, 0.36, color=BLUE, label="sent")
    for row in rows:
        beside(axes, received[row], row - 0.2, f"{received[row]:.2f}", 8)
        beside(axes, sent[row], row + 0.2, f"{sent[row]:.2f}", 8)
    axes.set_yticks(list(rows), names)
    bars(axes, "MB", max([*received, *sent], default=0.0))
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=9.5, frameon=False,
        labelcolor=INK, handlelength=1.0, columnspacing=1.0, borderaxespad=0.2,
    )  # fmt: skip


def heading(axes: Axes, text: str, under: str) -> None:
    """A panel's title with a line of explanation below it, and its common style."""
    # Room for two lines in every panel, so that the titles are level.
    axes.set_title(text, loc="left", fontsize=12, weight="bold", color=INK, pad=36)
    axes.annotate(
        under, (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points",
        fontsize=9.5, color=MUTED,
    )  # fmt: skip
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelcolor=INK, length=0, labelsize=9.5)


def bars(axes: Axes, unit: str, longest: float) -> None:
    """Axes of horizontal bars, the first one on top."""
    axes.invert_yaxis()
    axes.set_xlim(0, ROOM * longest or 1)
    axes.set_xlabel(unit, color=INK)
    axes.grid(axis="x", color=GRID)


def beside(axes: Axes, at: float, row: float, text: str, size: float = 9.5) -> None:
    """A figure behind the end of a bar."""
    axes.annotate(
        text, (at, row), (4, 0), textcoords="offset points", va="center", fontsize=size, color=INK
    )
