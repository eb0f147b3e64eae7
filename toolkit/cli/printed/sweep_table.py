"""The table of a sweep of simulations, and its JSON object."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from profiles.text_formatting import format_bytes, format_duration, wrapped
from toolkit.cli.printed.comparison_table import score_text
from toolkit.simulation.sweeps.grid import described, short_keys, shown
from toolkit.simulation.sweeps.trade_offs import LAST, best_of, front, traffic_of
from toolkit.terminal_output import print_table, table

if TYPE_CHECKING:
    from toolkit.simulation.sweeps.sweep import Failure
    from toolkit.simulation.sweeps.trade_offs import Limits, Point


def show_sweep(
    points: Sequence["Point"], failures: Sequence["Failure"], limits: "Limits", keys: Sequence[str]
) -> None:
    """Print a line for each point, the best one within `limits`, and what failed.

    `keys` are those of the grid.
    """
    efficient = front(points, "bytes")
    names = short_keys(keys)
    costs = {cost for point in points for cost in point.costs}
    further = ["memory"] * ("memory" in costs) + ["simulated"] * ("simulated_s" in costs)
    shown_table = table("row", *names.values(), f"last {LAST}", "sent", "a round", *further)
    for number, point in enumerate(points, 1):
        row = point.row
        cells = [f"{number}{'*' if point in efficient else ''}"]
        cells += [shown(point.values[key]) if key in point.values else "all" for key in names]
        cells.append(score_text(point.score, row.judged_by_loss))
        cells += [format_bytes(round(row.sent.mean)), format_bytes(round(traffic_of(row)))]
        if "memory" in costs:
            cells.append("" if row.memory is None else format_bytes(row.memory))
        if row.simulated_s is not None:
            cells.append(format_duration(row.simulated_s.mean))
        shown_table.add_row(*cells)
    print_table(shown_table)
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
