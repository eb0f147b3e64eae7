"""How often Python looks for objects that only refer to each other."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 50_000
"""Python looks after so many new objects. Its own default is 700 (2,000 from Python 3.13 on)."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for garbage rarely, which otherwise takes a fifth of the time of tracing.

    Tracing and loading libraries make millions of objects, and most of them stay. Also usable as a
    decorator.
    """
    before = gc.get_threshold()
    if before[0]:  # 0 means never
        gc.set_threshold(max(before[0], NEW_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
