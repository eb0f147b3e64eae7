"""Stages on stderr, and the form that tables on stdout have."""

import time
from textwrap import fill

from rich.console import Console
from rich.table import Table


class Stages:
    """Says on stderr which stage runs, with the time elapsed so far."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._console = Console(stderr=True, highlight=False)

    def __call__(self, stage: str) -> None:
        """Begin `stage`."""
        self._console.print(f"[{time.monotonic() - self._start:6.1f} s] {stage}", markup=False)


def table(*columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if place else "left", overflow="fold")
    return made


def filled(text: str, width: int, indent: str = "") -> str:
    """`text` in lines that end in no space; all but the first begin with `indent`.

    Names stay whole, low-rank too.
    """
    return fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
