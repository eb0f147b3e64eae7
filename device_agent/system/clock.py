"""This device's clock, and whether it can be believed: without a battery it starts in the past."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

RELEASED_S = datetime(2026, 11, 27, tzinfo=UTC).timestamp()
"""When the last version was released, in seconds since 1970: no right clock is before it."""
NOT_SYNCHRONISED = 5
"""What adjtimex(2) returns while nothing has set the clock (TIME_ERROR)."""
TIMEX_BYTES = 512
"""More than the structure of adjtimex(2). Zeros in it change nothing."""


def is_synchronised() -> bool:
    """Whether a time service has set the clock, as the kernel reports it."""
    try:
        state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return False
    return 0 <= state < NOT_SYNCHRONISED


@dataclass(frozen=True)
class Clock:
    """The time and who has set it; tests pass their own.

    Attributes:
        now: Gives the time, in seconds since 1970.
        synchronised: Whether a time service has set the clock.
    """

    now: Callable[[], float] = time.time
    synchronised: Callable[[], bool] = is_synchronised

    def is_believable(self, newest: float = 0) -> bool:
        """Whether a service has set the clock, or at least `newest` and the release are past."""
        return self.synchronised() or self.now() >= max(newest, RELEASED_S)

    def __str__(self) -> str:
        return time_text(self.now())


SYSTEM_CLOCK = Clock()


def time_text(seconds: float) -> str:
    """A time for people.

    Examples:
        >>> time_text(60)
        '1970-01-01 00:01 UTC'
    """
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):  # beyond any calendar
        return f"{seconds:.0f} s"
