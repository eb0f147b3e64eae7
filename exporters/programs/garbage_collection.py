"""Lets Python search less often for garbage: objects that only refer to each other."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

NEW_OBJECTS = 50_000
"""The number of new objects after which Python looks for garbage. Python's default is 700 (2,000
from version 3.13 on)."""


LOCK = Lock()
settings: list[tuple[int, int, int]] = []
"""One entry for each active context of any thread. All entries are equal: they are the setting of
the process before the first of these contexts began."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python search for garbage rarely. Otherwise the search takes a fifth of the tracing time.

    Tracing and loading libraries make millions of objects, and most of them stay. This context can
    also be used as a decorator. When the last open context of all threads ends, it restores the
    setting from before the first context.
    """
    with LOCK:
        settings.append(settings[0] if settings else gc.get_threshold())
        if settings[0][0]:  # 0 means never
            gc.set_threshold(max(settings[0][0], NEW_OBJECTS), *settings[0][1:])
    try:
        yield
    finally:
        with LOCK:
            before = settings.pop()
            if not settings:
                gc.set_threshold(*before)
