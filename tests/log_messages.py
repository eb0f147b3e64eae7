"""Collecting the log messages of this project (pytest runs without its logging plugin)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self, messages: list[str], thread: str | None) -> None:
        super().__init__()
        self.messages, self.thread = messages, thread

    def emit(self, record: logging.LogRecord) -> None:
        if self.thread in (None, record.threadName):
            self.messages.append(record.getMessage())


@contextmanager
def logged(
    name: str = "device_agent", messages: list[str] | None = None, thread: str | None = None
) -> Iterator[list[str]]:
    """The messages that the logger `name` and those below it get while the block runs.

    They are added to `messages` (default: a new list). `thread` restricts them to the thread with
    this name, for tests that run several agents in one process.
    """
    collected: list[str] = [] if messages is None else messages
    logger, handler = logging.getLogger(name), _Collector(collected, thread)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # without a handler, messages below WARNING are dropped
    try:
        yield collected
    finally:
        logger.removeHandler(handler)
