"""Waiting while the owner's limits ask for it."""

import datetime
import logging
import time
from collections.abc import Callable
from pathlib import Path

from device_agent.federation.owner_limits import OwnerLimits
from device_agent.formats.protocol import Progress
from device_agent.system import sensors
from device_agent.system.interval_timer import IntervalTimer
from profiles.text_formatting import format_duration

log = logging.getLogger(__name__)
LOOK_S = 2.0
"""How often the limits are looked at while work goes on, in seconds."""
PAUSED_LOOK_S = 10.0
REMIND_S = 300.0
"""How often the coordinator hears that a device is still paused, in seconds."""


class Pauses:
    """Waits while the owner's limits ask for it, and says so: here, and to the coordinator.

    `tell` sends progress; `sleep` waits and keeps whoever watches this process content.
    """

    def __init__(
        self,
        limits: OwnerLimits,
        tell: Callable[[Progress], None],
        sleep: Callable[[float], None],
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
        root: Path = sensors.SYS,
    ) -> None:
        limits.check(root)
        self._limits, self._tell, self._sleep = limits, tell, sleep
        self._now, self._root = now, root
        self._look = IntervalTimer(LOOK_S)

    def between_batches(self, then: Progress) -> None:
        """`wait`, looking at the limits every `LOOK_S` seconds only."""
        if self._look.due():
            self.wait(then)

    def wait(self, then: Progress | None = None) -> None:
        """Return once nothing asks for a pause; after one, `then` is what goes on."""
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
            self._sleep(PAUSED_LOOK_S)
            reason = self._reason(paused=True)
        log.info("Going on after a pause of %s.", format_duration(time.monotonic() - began))
        if then is not None:
            self._tell(then)

    def _reason(self, paused: bool) -> str | None:
        return self._limits.reason(self._now().time(), paused=paused, root=self._root)
