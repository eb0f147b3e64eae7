"""This device's clock, and whether its time is believable.

If a board has no battery, its clock shows a time in the past after each start.
"""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

RELEASED_S = datetime(2026, 11, 27, tzinfo=UTC).timestamp()
"""When the last version was released, in seconds since 1970. An earlier clock is wrong."""
NOT_SYNCHRONISED = 5
"""The result of adjtimex(2) while nothing has set the clock (TIME_ERROR)."""
TIMEX_BYTES = 512
"""Size of a buffer for adjtimex(2), larger than its structure. If all bytes are zero, the clock is
only read."""


def is_synchronised() -> bool:
    """Whether a time service has set the clock, according to the kernel."""
    try:
        state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return False
    return 0 <= state < NOT_SYNCHRONISED


@dataclass(frozen=True)
class Clock:
    """The time, and whether a time service has set it. Tests pass other clocks.

    Attributes:
        now: Returns the time, in seconds since 1970.
        synchronised: Whether a time service has set the clock.
    """

    now: Callable[[], float] = time.time
    synchronised: Callable[[], bool] = is_synchronised

    def is_believable(self, newest: float = 0) -> bool:
        """Whether a time service has set the clock, or the time is late enough to be correct.

        The time is late enough if it is not before `newest` (in seconds since 1970) and not before
        the release of this version.
        """
        return self.synchronised() or self.now() >= max(newest, RELEASED_S)

    def __str__(self) -> str:
        return time_text(self.now())


SYSTEM_CLOCK = Clock()


def time_text(seconds: float) -> str:
    """Format a time for people.

    Examples:
        >>> time_text(60)
        '1970-01-01 00:01 UTC'
    """
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):  # beyond any calendar
        return f"{seconds:.0f} s"
