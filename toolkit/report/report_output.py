"""Write the files of a report, and print its figures."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from device_agent.formats.atomic_files import write_file
from profiles.text_formatting import format_bytes, megabytes, milliseconds
from toolkit.report.charts import draw_png
from toolkit.report.html_page import page
from toolkit.report.phase_costs import Report, over_budget
from toolkit.terminal_output import table


def write(report: Report, out: Path | None, png: Path | None) -> None:
    """Write the page to `out` and the charts to `png`. A path that is None is skipped."""
    if out is not None:
        write_file(out, page(report).encode())
    if png is not None:
        write_file(png, draw_png(report))


def show(report: Report, written: Sequence[Path]) -> None:
    """Print the report's figures as a table, and the names of the files."""
    console = Console(highlight=False, soft_wrap=True)
    rows = table("submodel", "peak MB", "predicted", "stages ms", "forward", "backprop", "batch")
    for cost in report.costs:
        time = dict(cost.time)
        rows.add_row(
            cost.submodel,
            megabytes(cost.peak),
            megabytes(cost.predicted),
            *(milliseconds(time.get(part)) for part in ("stages", "forward", "backprop")),
            milliseconds(cost.seconds),
        )
    console.print(rows)
    for line in verdicts(report):
        console.print(line, markup=False)
    for path in written:
        console.print(f"written: {path} ({format_bytes(path.stat().st_size)})", markup=False)


def verdicts(report: Report) -> list[str]:
    """The highest peak, submodels over the budget, and unreliable figures."""
    highest = report.highest
    said = [] if highest is None else [f"peak: {highest.submodel}, {highest.decisive}"]
    for cost in report.costs:
        over = over_budget(report, cost)
        if over is not None and over > 0:
            said.append(
                f"over the budget of {format_bytes(report.budget)}: {cost.submodel}, by "
                f"{format_bytes(over)}"
            )
        said += [f"not valid: {cost.submodel}, {why}" for why in cost.profile.validity.invalid]
        if cost.unstable:
            said.append(f"unstable times: {cost.submodel}, {', '.join(cost.unstable)}")
    return said
