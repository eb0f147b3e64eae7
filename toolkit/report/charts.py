"""Draws the charts of a report: a stacked bar for each submodel, a line for a sustained run."""

import io
import re
import warnings
from collections.abc import Sequence
from typing import IO, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from profiles.documents.bundle_profile import Sustained
from profiles.text_formatting import NOT_MEASURABLE, format_bytes
from toolkit.report.phase_costs import Part, Report, over_budget

INK, MUTED, GRID, PAPER = "#1c2430", "#5b6676", "#dfe3e8", "#fefefe"
BUDGET, PREDICTED = "#c2272e", "#7a5bb0"
ON_BARS = "#11161d"
"""The colour of text on bars, which have light colours on light and on dark screens."""
COLOURS: dict[Part, str] = {
    "idle": "#b9c2cc",
    "stages": "#4fb8aa",
    "forward": "#7fb0e8",
    "backprop": "#f0a05a",
}
NAMES: dict[Part, str] = {
    "idle": "idle process",
    "stages": "forward stages",
    "forward": "forward pass",
    "backprop": "backpropagation",
}
THEMED = {
    INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", BUDGET: "budget",
    PREDICTED: "predicted", **{colour: part for part, colour in COLOURS.items()},
}  # fmt: skip
"""Colours that the page replaces on a dark screen, with the names of their CSS variables."""

WIDTH_IN, ROW_IN, BESIDES_IN = 8.6, 0.68, 0.85
NARROW = 0.075
"""A part gets no number if it takes less than this share of the axis."""


def draw_png(report: Report) -> bytes:
    """Draw the memory and the time of a report.

    Args:
        report: The costs of the submodels.

    Returns:
        A PNG file.
    """
    rows = len(report.costs)
    height = 2 * (ROW_IN * rows + BESIDES_IN) + 1.25
    drawn = Figure(figsize=(WIDTH_IN, height), dpi=144, facecolor=PAPER)
    drawn.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1)
    about = report.costs[0].profile
    heading = drawn.suptitle(
        f"One batch of {about.batch_size} on {name_of(report)}",
        x=0.018, ha="left", fontsize=13, weight="bold", color=INK,
    )  # fmt: skip
    # matplotlib would read a `$` in a name as the start of a formula.
    heading.set_parse_math(False)
    memory, time = drawn.subplots(2, 1)
    draw_memory(memory, report)
    draw_time(time, report)
    memory.set_title("Memory at the peak of the process", loc="left", fontsize=11, color=INK)
    time.set_title("Time", loc="left", fontsize=11, color=INK)
    drawn.legend(
        handles=[Patch(color=colour, label=name) for colour, name in keys(report).items()],
        loc="outside lower left", ncols=6, frameon=False, fontsize=9,
        handlelength=1, handleheight=1, columnspacing=1.4, borderpad=0.1, labelcolor=INK,
    )  # fmt: skip
    png = io.BytesIO()
    save(drawn, png, format="png")
    return png.getvalue()


def name_of(report: Report) -> str:
    """A short name of the machine."""
    about = report.machine
    return clipped(about.model or about.processor or about.architecture, 60)


def clipped(text: str, length: int) -> str:
    """`text` shortened to at most `length` characters."""
    return text if len(text) <= length else f"{text[: length - 1]}\N{HORIZONTAL ELLIPSIS}"


def keys(report: Report) -> dict[str, str]:
    """The meaning of each colour that the report uses."""
    shown = {part for cost in report.costs for part, _ in (*cost.memory, *cost.time)}
    meanings = {COLOURS[part]: NAMES[part] for part in COLOURS if part in shown}
    if any(cost.predicted for cost in report.costs):
        meanings[PREDICTED] = "predicted peak"
    return meanings


def draw_memory(axes: Axes, report: Report) -> None:
    """Draw process peaks in MB, each with its prediction below, and the budget as a line."""
    frame(axes, report)
    known = [cost.peak or 0 for cost in report.costs] + [c.predicted or 0 for c in report.costs]
    axes.set_xlim(0, 1.3 * max([*known, report.budget or 0, 1]) / 1e6)
    for row, cost in enumerate(report.costs):
        stack(axes, row, [(part, size / 1e6) for part, size in cost.memory])
        if cost.peak is None:
            note(axes, 0, row, NOT_MEASURABLE, MUTED)
            continue
        over = over_budget(report, cost)
        excess = f", {format_bytes(over)} over" if over is not None and over > 0 else ""
        mark = "  \N{BLACK LEFT-POINTING SMALL TRIANGLE} peak" if cost is report.highest else ""
        ahead = max(cost.peak, cost.predicted or 0) / 1e6
        said = f"{format_bytes(cost.peak)}{excess}{mark}"
        note(axes, ahead, row, said, BUDGET if excess else INK, weight="bold")
        if cost.predicted is not None:
            axes.barh(row + 0.37, cost.predicted / 1e6, 0.1, color=PREDICTED)
    if report.budget is not None:
        axes.axvline(report.budget / 1e6, color=BUDGET, linestyle=(0, (4, 3)), linewidth=1.4)
        axes.annotate(
            f"budget {format_bytes(report.budget)}",
            (report.budget / 1e6, 1), (0, 3), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", fontsize=9, color=BUDGET,
        )  # fmt: skip
    axes.set_xlabel("MB", color=MUTED, loc="left")


def draw_time(axes: Axes, report: Report) -> None:
    """Draw the median times of one batch, and the spread of the training step (p10 to p90)."""
    frame(axes, report)
    longest = max(cost.seconds for cost in report.costs)
    unit, per_s = ("s", 1.0) if longest >= 10 else ("ms", 1e3)
    ends = [c.seconds - c.train.median_s + c.train.p90_s for c in report.costs]
    axes.set_xlim(0, 1.2 * max(*ends, longest, 1e-9) * per_s)
    for row, (cost, end) in enumerate(zip(report.costs, ends, strict=True)):
        stack(axes, row, [(part, seconds * per_s) for part, seconds in cost.time])
        before = cost.seconds - cost.train.median_s
        axes.plot(
            [(before + cost.train.p10_s) * per_s, end * per_s], [row + 0.37] * 2,
            color=INK, linewidth=1.3, marker="|", markersize=5,
        )  # fmt: skip
        doubt = ", unstable" if cost.unstable else ""
        doubt = ", INVALID" if cost.profile.validity.invalid else doubt
        said = f"{short(cost.seconds * per_s)} {unit}{doubt}"
        note(axes, max(end, cost.seconds) * per_s, row, said, INK, weight="bold")
    axes.set_xlabel(f"{unit}; line: p10 to p90 of the training step", color=MUTED, loc="left")


def draw_sustained(axes: Axes, run: Sustained) -> None:
    """Draw the step time of a sustained run, and the temperature if it is known.

    In a sustained run the device trained for minutes without a pause.
    """
    minutes = [point.at_s / 60 for point in run.points]
    steps = [point.step.median_s * 1e3 for point in run.points]
    axes.plot(minutes, steps, color=COLOURS["backprop"], linewidth=1.8, marker=".")
    axes.set_ylim(0, 1.15 * max(steps))
    axes.set_xlabel("minutes", color=MUTED, loc="left")
    axes.set_ylabel("ms a step", color=COLOURS["backprop"])
    plain(axes)
    axes.grid(axis="both", color=GRID)
    heat = [p.temperature_c for p in run.points if p.temperature_c is not None]
    if len(heat) == len(minutes):
        other = axes.twinx()
        other.plot(minutes, heat, color=BUDGET, linewidth=1.2, linestyle=(0, (4, 2)))
        other.set_ylabel("degrees C", color=BUDGET)
        plain(other)


def frame(axes: Axes, report: Report) -> None:
    """Set up a row for each submodel, and the grid."""
    rows_of(axes, [clipped(cost.submodel, 40) for cost in report.costs], fontsize=10)
    axes.grid(axis="x", color=GRID)


def rows_of(axes: Axes, names: Sequence[str], fontsize: int) -> None:
    """Set up a row for each of `names`, from the top."""
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(range(len(names)), names, fontsize=fontsize)
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    plain(axes)
    axes.tick_params(axis="y", length=0, labelcolor=INK)


def plain(axes: Axes) -> None:
    """Remove the frame and the background of the axes, and use a pale colour for their labels."""
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=MUTED, labelsize=9)


def short(value: float) -> str:
    """A number with one decimal; from 1000 on, without decimals."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def stack(axes: Axes, row: int, parts: Sequence[tuple[Part, float]]) -> None:
    """Draw parts one after another, each with its number if there is room."""
    left = 0.0
    room = NARROW * axes.get_xlim()[1]
    for part, value in parts:
        axes.barh(row, value, 0.58, left=left, color=COLOURS[part], edgecolor=PAPER, linewidth=0.8)
        if value > room:
            # With a background, the line of the budget does not cross the number.
            ground = {"facecolor": COLOURS[part], "edgecolor": "none", "pad": 1.0}
            axes.text(
                left + value / 2, row, short(value), ha="center", va="center", fontsize=9,
                color=ON_BARS, bbox=ground,
            )  # fmt: skip
        left += value


def note(
    axes: Axes,
    at: float,
    row: float,
    text: str,
    colour: str,
    weight: str = "normal",
    size: float = 9,
) -> None:
    """Write a few words after the end of a bar."""
    axes.annotate(
        text, (at, row), (6, 0), textcoords="offset points", va="center", fontsize=size,
        color=colour, weight=weight, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.0},
    )  # fmt: skip


def svg(drawn: Figure, name: str, described: str) -> str:
    """Write a figure as an SVG element for a page.

    Args:
        drawn: The figure.
        name: A name that is unique on the page. The element's ids are made from it.
        described: A description for screen readers.

    Returns:
        The element. Its colours are variables of the page's style.
    """
    written = io.StringIO()
    # Without a date and with a fixed salt, the same report gives the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        save(drawn, written, format="svg", transparent=True, metadata={"Date": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # ids must be unique on a page
    text = re.sub(r"('[^']*', )+(sans-serif)", "system-ui, sans-serif", text)
    for colour, theme in THEMED.items():
        text = text.replace(colour, f"var(--{theme})")
    text = text.replace("<svg ", f'<svg role="img" aria-label="{described}" ', 1)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    return re.sub(r'(<svg [^>]*?) width="[^"]*pt" height="[^"]*pt"', r"\1", text, count=1)


def save(drawn: Figure, to: IO[str] | IO[bytes], **how: Any) -> None:
    """Write a figure and ignore warnings, such as a letter that is not in the font."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        drawn.savefig(to, **how)


def panel(rows: int) -> tuple[Figure, Axes]:
    """Make an empty figure for a page, with room for `rows` bars."""
    drawn = Figure(figsize=(WIDTH_IN, ROW_IN * rows + BESIDES_IN), layout="constrained")
    return drawn, drawn.add_subplot()
