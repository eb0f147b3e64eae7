"""The table of `edgetailor compare`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiles.text_formatting import format_bytes, format_duration
from toolkit.terminal_output import print_table, table

if TYPE_CHECKING:
    from toolkit.simulation.comparison import Row, Spread


def show_comparison(rows: Sequence["Row"]) -> None:
    """Print a line for each row: scores, traffic and time."""
    with_own = any(row.own_models for row in rows)
    with_clock = any(row.simulated_s for row in rows)
    own, clock = ["own"] if with_own else [], ["simulated"] if with_clock else []
    shown = table("run", "seeds", "final", "best", *own, "sent", "time", *clock)
    for row in rows:
        cells = [row.name, str(len(row.histories))]
        cells += [_score(score, row.judged_by_loss) for score in (row.final, row.best)]
        if with_own:
            cells.append(_score(row.own_models, by_loss=False))
        cells += [format_bytes(round(row.sent.mean)), f"{row.seconds.mean:.0f} s"]
        if row.simulated_s:
            cells.append(format_duration(row.simulated_s.mean))
        shown.add_row(*cells)
    print_table(shown)


def _score(value: "Spread | None", by_loss: bool) -> str:
    """A score as text, like 98.3±0.2% or 0.032±0.001."""
    if value is None:
        return ""
    scale, digits, unit = (1, 4, "") if by_loss else (100, 1, "%")
    around = "" if value.deviation is None else f"±{scale * value.deviation:.{digits}f}"
    return f"{scale * value.mean:.{digits}f}{around}{unit}"
