"""Logging events that others cause as often as they like: a line a minute for each who does."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

WINDOW_S = 60.0
MOST = 100
"""How many have lines of their own at a time for one kind of event; all others share lines."""
OTHERS = "others"


@dataclass
class _Window:
    """The minute after a line; `more` events have come in it."""

    ends: float
    more: int = 0


class MinuteLog:
    """Lets the first event of somebody be logged, and logs once a minute how many more came.

    It may be used from any thread. `flush` has to be called now and then.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._windows: dict[tuple[str, str], _Window] = {}
        self._own: Counter[str] = Counter()

    def begins(self, who: str, more: str) -> bool:
        """Whether the caller logs the event now; otherwise it is counted.

        Args:
            who: Who caused the event, such as an address.
            more: What is logged of those that were counted, with the places `{more}` ("3 more") and
                `{who}`. It names the kind of event.
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
        """Log what was counted in the minutes that are over."""
        with self._lock:
            self._flush()

    def _begin(self, more: str, who: str) -> None:
        self._windows[more, who] = _Window(self._clock() + WINDOW_S)
        self._own[more] += who != OTHERS

    def _flush(self) -> None:
        now = self._clock()
        # The windows are in the order of their ends, because all are equally long.
        while self._windows and next(iter(self._windows.values())).ends <= now:
            more, who = next(iter(self._windows))
            window = self._windows.pop((more, who))
            self._own[more] -= who != OTHERS
            if window.more:
                logger.warning(more.format(more=f"{window.more:,} more", who=who))
                self._begin(more, who)
