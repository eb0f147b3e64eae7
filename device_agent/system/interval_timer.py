"""A timer for work that is due at regular intervals."""

import time


class IntervalTimer:
    """Tells when an interval has passed. Changes of the wall clock do not affect it."""

    def __init__(self, seconds: float) -> None:
        """Start the first interval of `seconds` seconds."""
        self._seconds, self._start = seconds, time.monotonic()

    def due(self) -> bool:
        """Whether the interval has passed. If it has, the next interval starts."""
        now = time.monotonic()
        due = now - self._start >= self._seconds
        self._start = now if due else self._start
        return due
