"""Log lines for people and for programs, and the handler that commands write them with.

Libraries only call `logging.getLogger(__name__)`. A command shows their messages with `show_logs`.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

PACKAGES = ("device_agent", "exporters", "profiles", "toolkit")
"""The packages whose log messages a command shows; other libraries keep their own handlers."""

Write = Callable[[str], None]
Field = str | int | float | bool


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """Values that the JSON log adds to a message.

    Examples:
        >>> fields(round=3)
        {'fields': {'round': 3}}

        Pass the result as `extra`: `log.info("Round %d: training", 3, extra=fields(round=3))`.
    """
    return {"fields": values}


class PlainFormatter(logging.Formatter):
    """One line of text for each message; with a local time stamp if `stamped`."""

    def __init__(self, *, stamped: bool = False) -> None:
        super().__init__()
        self._stamped = stamped

    def format(self, record: logging.LogRecord) -> str:
        """Format `record` as text."""
        message = record.getMessage()
        if not self._stamped:
            return message
        return f"[{_local_time(record).isoformat(timespec='seconds')}] {message}"


class JsonFormatter(logging.Formatter):
    """One JSON object for each message: time, elapsed_s, level, message and the message's fields.

    `elapsed_s` counts from the creation of the formatter. Its clock is monotonic, so it stays
    correct when the wall clock is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()

    def format(self, record: logging.LogRecord) -> str:
        """Format `record` as JSON."""
        line = {
            "time": _local_time(record).isoformat(timespec="milliseconds"),
            "elapsed_s": round(time.monotonic() - self._began, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage().strip(),
        }
        return json.dumps(line | getattr(record, "fields", {}))


class LineHandler(logging.Handler):
    """Gives each formatted message to `write`."""

    def __init__(self, write: Write, formatter: logging.Formatter) -> None:
        super().__init__()
        self._write = write
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Write `record`. Errors of `write` (a closed pipe) reach the caller."""
        self._write(self.format(record))


@contextmanager
def show_logs(
    write: Write, formatter: logging.Formatter, level: int = logging.INFO
) -> Iterator[None]:
    """Write the log messages of this project's packages while the block runs.

    A nested block replaces the handler of the outer block until it ends.

    Args:
        write: Takes each formatted line, without a line break at its end.
        formatter: A `PlainFormatter` or a `JsonFormatter`.
        level: The lowest level that is written.
    """
    handler = LineHandler(write, formatter)
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers = [h for h in logger.handlers if not isinstance(h, LineHandler)]
        logger.addHandler(handler)
        logger.setLevel(level)
        # A user's model may configure the root logger, which would print each line twice.
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (handlers, old_level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(old_level)


def _local_time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created).astimezone()
