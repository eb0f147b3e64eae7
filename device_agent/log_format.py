"""Formats log lines for people and for programs. Commands write the lines with a handler from here.

The project's modules only call `logging.getLogger(__name__)`. A command shows their messages with
`show_logs`, and hides the messages of other packages with `quieten_others`.
"""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import TextIO

PACKAGES = ("device_agent", "exporters", "profiles", "toolkit")
"""The packages whose log messages a command shows; other libraries keep their own handlers."""

OWN = tuple(f"{Path(__file__).parents[1] / name}{os.sep}" for name in PACKAGES)
"""The folders of these packages."""
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Part of the path of every installed package."""
STANDARD = f"{Path(os.__file__).parent}{os.sep}"
"""The folder of the standard library."""

Write = Callable[[str], None]
Field = str | int | float | bool
REQUEST: ContextVar[str | None] = ContextVar("REQUEST", default=None)
"""The id of the HTTP request that is being handled; the JSON log adds it to messages."""


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """Wrap values that the JSON log adds to a message.

    Examples:
        >>> fields(round=3)
        {'fields': {'round': 3}}

        Pass the result as `extra`: `log.info("Round %d: training", 3, extra=fields(round=3))`.
    """
    return {"fields": values}


class PlainFormatter(logging.Formatter):
    """Formats each message as one line of text, with a local time stamp if `stamped`."""

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
    """Formats each message as a JSON object: time, elapsed_s, level, message and its fields.

    `request` is the id of the HTTP request that caused the message, if there is one.
    `elapsed_s` counts from the creation of the formatter. It comes from a monotonic clock, so
    setting the wall clock does not change it.
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
        if (request := REQUEST.get()) is not None:
            line["request"] = request
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

    While a nested block runs, its handler replaces the handler of the outer block.

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


def quieten_others() -> None:
    """From now on, hide the warnings of other packages, and their log messages below ERROR.

    Commands and their child processes call this. Messages of the user's own modules stay visible.
    Warnings that the user enabled (`python -W`, PYTHONWARNINGS) also stay visible.
    """
    # Filter before all handlers: some packages have their own handlers, and a user's model may
    # configure the root logger, which would show every package's messages.
    logging.Logger.callHandlers = _call_handlers  # type: ignore[method-assign, assignment]
    if not sys.warnoptions:
        warnings.showwarning = _show_warning


_every_handler, _every_warning = logging.Logger.callHandlers, warnings.showwarning


def _call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
    own = record.name.partition(".")[0] in PACKAGES
    if own or record.levelno >= logging.ERROR or not _is_others(record.pathname):
        _every_handler(logger, record)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    # A library's warning may name the line of this project that called it.
    if not _is_others(filename) and not filename.startswith(OWN):
        _every_warning(message, category, filename, lineno, file, line)


def _is_others(path: str) -> bool:
    """Whether the code in `path` is neither the user's nor this checkout's."""
    return path.startswith((STANDARD, "<")) or any(part in path for part in INSTALLED)


def _local_time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created).astimezone()
