"""The HTTP statuses of temporary problems, and the waits and log lines of an outage."""

import logging
from collections.abc import Callable

from profiles.text_formatting import format_duration

log = logging.getLogger(__name__)
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses of temporary problems: the request is repeated."""
FIRST_WAIT_S = 1.0
"""Wait before the first repetition; each later wait is twice as long."""
LONGEST_WAIT_S = 60.0
REPORT_S = 3600.0
"""Time between two log lines about a long outage."""


class Outage:
    """Waits between the attempts while the coordinator does not answer.

    It logs a line when the outage begins, each hour, and when the outage ends. An agent may wait
    for days, so a line for each attempt would fill the log.

    Args:
        ended: The log line for the end of the outage.
        sleep: Waits for a number of seconds.
        patience_s: How long to wait in total, in seconds.

    Attributes:
        waited_s: Seconds waited since the start of the outage, or since a transfer last progressed.
    """

    def __init__(self, ended: str, sleep: Callable[[float], None], patience_s: float) -> None:
        self._ended, self._sleep, self.patience_s = ended, sleep, patience_s
        self._all_s, self._logged_s = 0.0, -REPORT_S
        self.progressed()

    def progressed(self) -> None:
        """Reset the waits: the next wait is the shortest, and `waited_s` starts from zero."""
        self.waited_s, self._next_s = 0.0, FIRST_WAIT_S

    @property
    def over_patience(self) -> bool:
        """Whether the total time waited would exceed `patience_s` after the next wait."""
        return self.waited_s + self._next_s > self.patience_s

    def wait(self, problem: str, *, patiently: bool = False) -> None:
        """Wait before the next attempt.

        Args:
            problem: The reason, as a sentence without its full stop.
            patiently: Whether to wait without a time limit. The log then names no limit.
        """
        if self._all_s - self._logged_s >= REPORT_S:
            limited = self.patience_s < float("inf") and not patiently
            long = f" for up to {format_duration(self.patience_s)}" if limited else ""
            log.info("%s; trying again%s", problem, long)
            self._logged_s = self._all_s
        self._sleep(self._next_s)
        self.waited_s, self._all_s = self.waited_s + self._next_s, self._all_s + self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_WAIT_S)

    def over(self) -> None:
        """Log the end of the outage, if there was one."""
        if self._all_s:
            log.info("%s after %s.", self._ended, format_duration(self._all_s))
