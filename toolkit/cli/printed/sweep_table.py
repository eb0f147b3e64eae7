"""The table of a sweep of simulations, and its JSON object."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import click
from rich.console import Console
from rich.table import Table

from profiles.text_formatting import WIDTH, format_bytes, format_duration, wrapped
from toolkit.cli.printed.comparison_table import score_text
from toolkit.simulation.sweeps.grid import described, short_keys, shown
from toolkit.simulation.sweeps.trade_offs import LAST, best_of, front, traffic_of
from toolkit.terminal_output import print_table, table

if TYPE_CHECKING:
    from toolkit.simulation.sweeps.sweep import Failure
    from toolkit.simulation.sweeps.trade_offs import Limits, Point

Column: TypeAlias = tuple[str, list[str]]
"""The head of a column, and its cells."""


def show_sweep(
    points: Sequence["Point"], failures: Sequence["Failure"], limits: "Limits", keys: Sequence[str]
) -> None:
    """Print a line for each point, the best point within `limits`, and the failed simulations.

    `keys` are the keys of the grid. A table that is too wide is printed in two parts: first the
    values, then the figures.
    """
    efficient = front(points, "bytes")
    marks = [f"{n}{'*' if point in efficient else ''}" for n, point in enumerate(points, 1)]
    rows, values, figures = ("row", marks), _values(points, keys), _figures(points)
    whole = _table([rows, *values, *figures])
    if Console(width=10 * WIDTH).measure(whole).maximum <= WIDTH:
        print_table(whole)
    else:
        print_table(_table([rows, *values]))
        click.echo()
        print_table(_table([rows, *figures]))
    click.echo("\n* No other row is as good for fewer bytes.")
    within = f" within {limits.text()}" if limits.known else ""
    best = best_of(points, limits)
    text = f"No row keeps{within.removeprefix(' within')}."
    if best is not None:
        text = f"Best{within}: row {points.index(best) + 1}, {described(best.values)}."
    click.echo("\n".join(wrapped("", text)))
    for failure in failures:
        text = f"Failed: {described(failure.run.values)}: {failure.error}"
        click.echo("\n".join(wrapped("", text)))


def _values(points: Sequence["Point"], keys: Sequence[str]) -> list[Column]:
    """A column for each of `keys` whose values differ."""
    columns = []
    for key, name in short_keys(keys).items():
        cells = [shown(own.values[key]) if key in own.values else "all" for own in points]
        if len({*cells}) > 1:
            columns.append((name, cells))
    return columns


def _figures(points: Sequence["Point"]) -> list[Column]:
    """The columns with scores and costs. A cost that no point has gets no column."""
    memory = [point.row.memory for point in points]
    times = [point.row.simulated_s for point in points]
    columns = [
        (f"last {LAST}", [score_text(own.score, own.row.judged_by_loss) for own in points]),
        ("sent", [format_bytes(round(own.row.sent.mean)) for own in points]),
        ("a round", [format_bytes(round(traffic_of(own.row))) for own in points]),
        ("memory", ["" if own is None else format_bytes(own) for own in memory]),
        ("simulated", ["" if own is None else format_duration(own.mean) for own in times]),
    ]
    return [(name, cells) for name, cells in columns if any(cells)]


def _table(columns: Sequence[Column]) -> Table:
    made = table(*(name for name, _ in columns))
    for cells in zip(*(cells for _, cells in columns), strict=True):
        made.add_row(*cells)
    return made


def sweep_object(
    points: Sequence["Point"], failures: Sequence["Failure"], limits: "Limits"
) -> dict[str, object]:
    """The JSON object of a sweep. `best` is the number of a run, from 1."""
    efficient, best = front(points, "bytes"), best_of(points, limits)
    return {
        "version": 1,
        "runs": [
            {
                "values": point.values,
                "folders": [str(folder) for folder in point.row.folders],
                f"last_{'loss' if point.row.judged_by_loss else 'accuracy'}": (
                    point.score._asdict()
                ),
                "bytes": point.costs["bytes"],
                "bytes_per_device_and_round": point.costs["traffic"],
                "memory_bytes": point.costs.get("memory"),
                "simulated_s": point.costs.get("simulated_s"),
                "best_for_its_bytes": point in efficient,
                "within_limits": point.keeps(limits),
            }
            for point in points
        ],
        "best": None if best is None else points.index(best) + 1,
        "failed": [
            {"values": run.values, "code": error.code, "message": str(error)}
            for run, error in failures
        ],
    }
