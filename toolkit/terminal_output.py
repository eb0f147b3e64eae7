"""Log messages as stages on stderr, and the form of tables on stdout."""

import logging
import time
from textwrap import fill

from rich.console import Console
from rich.table import Table

from profiles.text_formatting import visible

PACKAGES = ("toolkit", "exporters")
"""The packages whose messages a command shows."""


class StageHandler(logging.Handler):
    """Prints each log message on stderr, with the seconds since the handler was created."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._start = time.monotonic()
        self.console = Console(stderr=True, highlight=False)

    def emit(self, record: logging.LogRecord) -> None:
        """Print `record` as one line."""
        elapsed = time.monotonic() - self._start
        line = f"[{elapsed:6.1f} s] {record.getMessage()}"
        self.console.print(line, markup=False, soft_wrap=True)  # long paths stay whole


def show_stages() -> Console:
    """Print the server side's log on stderr as stages, for the rest of this process.

    The new handler replaces the packages' other handlers, which would print every line again.
    Returns the handler's console. A live display on this console does not mix with the log lines.
    """
    handler = StageHandler()
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO)
    return handler.console


def table(*columns: str) -> Table:
    """Make an empty table. The first column is for text, and the other columns are for numbers."""
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        rows.add_column(column, justify="right" if number else "left", overflow="fold")
    return rows


def print_table(rows: Table, width: int | None = None) -> None:
    """Print a table without the spaces that rich adds at the end of lines.

    Brackets in cells are text: devices choose their names.
    """
    console = Console(highlight=False, markup=False, width=width)
    with console.capture() as drawn:
        console.print(rows)
    print("\n".join(visible(line.rstrip()) for line in drawn.get().splitlines()))


def filled(text: str, width: int, indent: str = "") -> str:
    """Break `text` into lines of at most `width`; all but the first begin with `indent`.

    Names are not broken, even at hyphens as in low-rank. No line ends with a space.
    """
    return fill(
        visible(text),
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
