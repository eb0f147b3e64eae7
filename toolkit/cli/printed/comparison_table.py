"""The table of `edgetailor compare`."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import click
from rich.text import Text

from device_agent.formats.protocol.fleet import FederatedEvaluation, KindEvaluation
from profiles.text_formatting import format_bytes, format_duration
from toolkit.cli.printed.evaluation_table import NAME, clipped, show_classes_compared
from toolkit.simulation.comparison import Spread
from toolkit.terminal_output import print_table, table

if TYPE_CHECKING:
    from toolkit.simulation.comparison import Row

Figure = TypeVar("Figure")


def show_comparison(rows: Sequence["Row"], last: int, target: float | None) -> None:
    """Print two lines for each row: scores, traffic and time; then what a device needs.

    `last` and `target` are the options of the command.
    """
    with_own = any(row.own_models for row in rows)
    with_clock = any(row.simulated_s for row in rows)
    own, clock = ["own"] if with_own else [], ["simulated"] if with_clock else []
    shown = table("run", "seeds", "final", "best", *own, "sent", "time", *clock)
    for row in rows:
        cells = [row.name, str(len(row.histories))]
        cells += [score_text(score, row.judged_by_loss) for score in (row.final, row.best)]
        if with_own:
            cells.append(score_text(row.own_models, by_loss=False))
        cells += [format_bytes(round(row.sent.mean)), f"{row.seconds.mean:.0f} s"]
        if row.simulated_s:
            cells.append(format_duration(row.simulated_s.mean))
        shown.add_row(*cells)
    print_table(shown)
    _show_needs(rows, last, target)
    names = dict.fromkeys(name for row in rows for name in row.further)
    if names:
        click.echo()
        further = table("run", *names)
        for row in rows:
            known = row.further
            further.add_row(
                row.name, *(score_text(known.get(name), by_loss=True) for name in names)
            )
        print_table(further)


def _show_needs(rows: Sequence["Row"], last: int, target: float | None) -> None:
    """Print a line for each row: mean of the last rounds, needs of a device, cost of `target`."""
    columns = {f"last {last}": [score_text(o.mean_of_last(last), o.judged_by_loss) for o in rows]}
    if any(row.backdoor for row in rows):
        columns["backdoor"] = [score_text(row.backdoor, by_loss=False) for row in rows]
    if any(row.traffic for row in rows):
        columns["a day"] = [format_bytes(row.traffic.mean) if row.traffic else "" for row in rows]
    if any(row.memory for row in rows):
        columns["memory"] = [format_bytes(row.memory) if row.memory else "" for row in rows]
    if target is not None:
        costs = [row.reaching(target) for row in rows]
        rounds = f"rounds to {target:g}"
        columns[rounds] = [f"{cost.rounds.mean:.0f}" if cost else "never" for cost in costs]
        columns["sent by then"] = [format_bytes(cost.sent.mean) if cost else "" for cost in costs]
        times = [cost and cost.simulated_s for cost in costs]
        if any(times):
            columns["time by then"] = [format_duration(time.mean) if time else "" for time in times]
    shown = table("run", *columns)
    for row, *cells in zip(rows, *columns.values(), strict=True):
        shown.add_row(row.name, *cells)
    click.echo()
    print_table(shown)


def score_text(value: Spread | None, by_loss: bool) -> str:
    """A score as text, like 98.3±0.2% or 0.032±0.001."""
    if value is None:
        return ""
    scale, digits, unit = (1, 4, "") if by_loss else (100, 1, "%")
    around = "" if value.deviation is None else f"±{scale * value.deviation:.{digits}f}"
    return f"{scale * value.mean:.{digits}f}{around}{unit}"


def show_by_class(rows: Sequence["Row"]) -> None:
    """Print the accuracy of each class in the last round, the runs side by side."""
    known = _by_name(rows, [row.classes for row in rows])
    click.echo()
    if not known:
        click.echo("No run has figures by class.")
        return
    if len({len(counts) for counts in known.values()}) > 1:
        click.echo("The runs have different numbers of classes.")
        return
    click.echo("Accuracy of each class on held-out samples:")
    show_classes_compared(str, known)


def show_by_device(rows: Sequence["Row"]) -> None:
    """Print how the clients of the last round judge the model, with the runs side by side."""
    known = _by_name(rows, [row.devices for row in rows])
    click.echo()
    if not known:
        click.echo("In no run do devices judge: set `share` in [evaluation].")
        return
    by_loss = any(own.accuracy is None for judged in known.values() for own in judged)
    figures = [
        {name: [own[name] for own in runs if name in own] for name in dict.fromkeys(chain(*runs))}
        for judged in known.values()
        for runs in [[_device_figures(own, by_loss) for own in judged]]
    ]
    click.echo(f"{'Loss' if by_loss else 'Accuracy'} on the samples of devices:")
    shown = table("devices", *(clipped(name, NAME) for name in known), "difference")
    for name in dict.fromkeys(chain(*figures)):
        values = [_mean(own.get(name, [])) for own in figures]
        cells = [
            "" if value is None else score_text(Spread(value, None), by_loss) for value in values
        ]
        first, last = values[0], values[-1]
        difference = ""
        if first is not None and last is not None and len(values) > 1:
            difference = f"{last - first:+.4f}" if by_loss else f"{100 * (last - first):+.1f}"
        shown.add_row(Text(clipped(name, NAME)), *cells, difference)
    print_table(shown)


def _device_figures(judged: FederatedEvaluation, by_loss: bool) -> dict[str, float | None]:
    """Map the names of lines to figures: all devices, their mean, the worst tenth, each kind."""

    def both(name: str, own: KindEvaluation) -> dict[str, float | None]:
        if by_loss:
            return {name: own.loss, f"{name}, trained": own.trained_loss}
        return {name: own.accuracy, f"{name}, trained": own.trained_accuracy}

    figures = both("all", judged)
    figures["mean of devices"] = judged.mean_loss if by_loss else judged.mean_accuracy
    figures["worst tenth"] = judged.worst_loss if by_loss else judged.worst_accuracy
    for name, kind in judged.kinds.items():
        figures |= both(f"kind {name}", kind)
    return figures


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean over the runs of a row; None if a run has no figure."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _by_name(rows: Sequence["Row"], figures: Sequence[Figure | None]) -> dict[str, Figure]:
    """Map the names of rows to their figures, if known. A repeated name gets a number."""
    known: dict[str, Figure] = {}
    for row, own in zip(rows, figures, strict=True):
        if own is not None:
            name = row.name if row.name not in known else f"{row.name} ({len(known) + 1})"
            known[name] = own
    return known
