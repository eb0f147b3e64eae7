"""Pauses that the owner's limits require."""

import datetime
import logging
import time
from collections.abc import Callable
from pathlib import Path

from device_agent.federation.owner_limits import OwnerLimits
from device_agent.formats.protocol.rounds import Progress
from device_agent.system import sensors
from device_agent.system.interval_timer import IntervalTimer
from profiles.text_formatting import format_duration

log = logging.getLogger(__name__)
CHECK_S = 2.0
"""Time between two checks of the limits during work."""
PAUSED_CHECK_S = 10.0
REMIND_S = 300.0
"""Time between two messages that the device is still paused. Without them, the coordinator would
treat it as gone."""


class Pauses:
    """Waits while the owner's limits require a pause. Reports each pause to log and coordinator.

    Args:
        limits: The owner's limits.
        tell: Sends progress to the coordinator.
        sleep: Waits for a number of seconds and notifies the service manager.
        now: Returns the local time.
        root: Root of sysfs.
    """

    def __init__(
        self,
        limits: OwnerLimits,
        tell: Callable[[Progress], None],
        sleep: Callable[[float], None],
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
        root: Path = sensors.SYS,
    ) -> None:
        self._limits, self._tell, self._sleep = limits, tell, sleep
        self._now, self._root = now, root
        self._check = IntervalTimer(CHECK_S)

    def between_batches(self, then: Progress) -> None:
        """Call `wait`, but not more often than every `CHECK_S` seconds."""
        if self._check.due():
            self.wait(then)

    def wait(self, then: Progress | None = None) -> None:
        """Wait until no limit requires a pause.

        Args:
            then: The progress to report after a pause.
        """
        reason = self._reason(paused=False)
        if reason is None:
            return
        began, remind = time.monotonic(), IntervalTimer(REMIND_S)
        told = None
        while reason is not None:
            if reason != told:
                log.info("Paused: %s.", reason)
            if reason != told or remind.due():
                self._tell(Progress(state="paused", note=reason))
            told = reason
            self._sleep(PAUSED_CHECK_S)
            reason = self._reason(paused=True)
        log.info("Continuing after a pause of %s.", format_duration(time.monotonic() - began))
        if then is not None:
            self._tell(then)

    def _reason(self, paused: bool) -> str | None:
        return self._limits.reason(self._now().time(), paused=paused, root=self._root)
