"""Limits log lines about events that devices and strangers can cause very often.

Each sender causes at most one line a minute.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

WINDOW_S = 60.0
MOST = 100
"""How many senders have their own lines for one kind of event; all other senders share a line."""
OTHERS = "others"


@dataclass
class _Window:
    """The minute after a logged line; `more` events have come since then."""

    ends: float
    more: int = 0


class MinuteLog:
    """Lets the first event of each sender be logged, and counts later events for a minute.

    At the end of the minute it logs the count. It may be used from any thread. `flush` must be
    called from time to time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._windows: dict[tuple[str, str], _Window] = {}
        self._own: Counter[str] = Counter()

    def begins(self, who: str, more: str) -> bool:
        """Return whether the caller should log the event now. If not, the event is counted.

        Args:
            who: Who caused the event, such as an address.
            more: The line that is logged for counted events, with the fields `{more}` ("3 more")
                and `{who}`. This line identifies the kind of event.
        """
        with self._lock:
            self._flush()
            if (more, who) not in self._windows and self._own[more] >= MOST:
                who = OTHERS
            window = self._windows.get((more, who))
            if window is not None:
                window.more += 1
                return False
            self._begin(more, who)
            return True

    def flush(self) -> None:
        """Log the number of counted events for every minute that is over."""
        with self._lock:
            self._flush()

    def _begin(self, more: str, who: str) -> None:
        self._windows[more, who] = _Window(self._clock() + WINDOW_S)
        self._own[more] += who != OTHERS

    def _flush(self) -> None:
        now = self._clock()
        # The windows are sorted by their ends, because all have the same length.
        while self._windows and next(iter(self._windows.values())).ends <= now:
            more, who = next(iter(self._windows))
            window = self._windows.pop((more, who))
            self._own[more] -= who != OTHERS
            if window.more:
                logger.warning(more.format(more=f"{window.more:,} more", who=who))
                self._begin(more, who)
