"""Shows the rounds of a running simulation: in a terminal a progress bar, else log lines."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from profiles.text_formatting import counted

if TYPE_CHECKING:
    from toolkit.simulation.logged_figures import Observer
    from toolkit.simulation.results import RoundResult

logger = logging.getLogger(__name__)
WHOLE_RUN_S = 1e9
"""Longer than any run, so the remaining time is estimated from all rounds so far."""


@contextmanager
def shown_rounds(console: Console, rounds: int) -> Iterator["Observer"]:
    """Provide a function that shows the result of a finished round.

    In a terminal the function moves a progress bar on `console`; otherwise it logs a line. `rounds`
    is the number of all rounds.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda result: logger.info(
            f"Round {result.round} of {rounds}: {_scores(result)}, "
            f"{counted(result.clients, 'client')}{_lost(result)}{_staleness(result)}, "
            f"{result.seconds:.2f} s"
        )
        return
    columns = (
        TextColumn("Round {task.completed:.0f} of {task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        *(TextColumn("elapsed"), TimeElapsedColumn()),
        *(TextColumn("remaining"), TimeRemainingColumn()),
    )
    with Progress(*columns, console=console, speed_estimate_period=WHOLE_RUN_S) as bar:
        task = bar.add_task("", total=rounds)
        yield lambda result: bar.update(
            task, completed=result.round, description=_scores(result), refresh=True
        )


def _lost(result: "RoundResult") -> str:
    numbers = {
        "failed": result.failed,
        "late": result.late,
        "not needed": result.not_needed,
        "diverged": result.diverged,
        "left out": len(result.left_out or ()),
        "limited": len(result.limited or ()),
    }
    text = ", ".join(f"{number} {what}" for what, number in numbers.items() if number)
    return f" ({text})" if text else ""


def _staleness(result: "RoundResult") -> str:
    if result.mean_staleness is None:
        return ""
    return f", staleness {result.mean_staleness:.1f} (at most {result.max_staleness})"


def _scores(result: "RoundResult") -> str:
    accuracy = "" if result.accuracy is None else f"accuracy {result.accuracy:.1%}, "
    received = "" if result.devices is None else f"; received model: {result.devices.text()}"
    return f"{accuracy}loss {result.loss:.4f}{received}"
