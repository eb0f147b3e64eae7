"""What the owner of a device allows it to do, and waiting while it may not."""

import datetime
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from device_agent import sensors
from device_agent.interpreter import Every
from device_agent.protocol import Progress
from profiles.errors import InputError

COOLER_C = 5.0
"""How much below the limit a device cools down before it goes on, in degrees Celsius."""
LOOK_S = 2.0
"""How often the limits are looked at while work goes on, in seconds."""
PAUSED_LOOK_S = 10.0
REMIND_S = 300.0
"""How often the coordinator hears that a device is still paused, in seconds."""


@dataclass(frozen=True)
class QuietHours:
    """A time of every day, by the local clock; `start` is in it, `end` is not."""

    start: datetime.time
    end: datetime.time

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read 22:00-07:00. Raises InputError for anything else."""
        found = re.fullmatch(r"(\d\d):(\d\d)-(\d\d):(\d\d)", text.strip())
        try:
            first, second, third, fourth = map(int, found.groups() if found else ())
            start, end = datetime.time(first, second), datetime.time(third, fourth)
        except ValueError:
            start = end = datetime.time()
        if start == end:
            raise InputError(
                f"{text!r} are no quiet hours: write two different times like 22:00-07:00."
            )
        return cls(start, end)

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M}"

    def covers(self, moment: datetime.time) -> bool:
        """Whether `moment` is in them, which may go past midnight."""
        if self.start < self.end:
            return self.start <= moment < self.end
        return moment >= self.start or moment < self.end


@dataclass(frozen=True)
class OwnerLimits:
    """When to pause: above `max_temperature` (degrees Celsius), on battery, in `quiet_hours`."""

    max_temperature: float | None = None
    only_when_charging: bool = False
    quiet_hours: QuietHours | None = None

    def reason(
        self, now: datetime.time, *, paused: bool = False, root: Path = sensors.SYS
    ) -> str | None:
        """Why to pause at `now`, if there is a reason; `paused`: it already is.

        `root` is that of sysfs. What the machine does not measure is no reason.
        """
        if self.quiet_hours is not None and self.quiet_hours.covers(now):
            return f"quiet hours until {self.quiet_hours.end:%H:%M}"
        if self.only_when_charging and sensors.charging(root) is False:
            return "running on battery"
        if self.max_temperature is not None:
            degrees = sensors.temperature_c(root)
            limit = self.max_temperature - (COOLER_C if paused else 0)
            if degrees is not None and degrees > limit:
                return f"warmer than {self.max_temperature:g} °C"
        return None

    def check(self, root: Path = sensors.SYS) -> None:
        """Raise InputError for a limit that this machine cannot keep."""
        if self.max_temperature is not None and sensors.temperature_c(root) is None:
            raise InputError(
                "This machine shows no temperature (/sys/class/thermal), so --max-temperature "
                "cannot be kept: leave it out."
            )


class Pauses:
    """Waits while the owner's limits ask for it, and says so: here, and to the coordinator.

    `tell` sends progress; `sleep` waits and keeps whoever watches this process content.
    """

    def __init__(
        self,
        limits: OwnerLimits,
        say: Callable[[str], None],
        tell: Callable[[Progress], None],
        sleep: Callable[[float], None],
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
        root: Path = sensors.SYS,
    ) -> None:
        limits.check(root)
        self._limits, self._say, self._tell, self._sleep = limits, say, tell, sleep
        self._now, self._root = now, root
        self._look = Every(LOOK_S)

    def between_batches(self, then: Progress) -> None:
        """`wait`, looking at the limits every `LOOK_S` seconds only."""
        if self._look.due():
            self.wait(then)

    def wait(self, then: Progress | None = None) -> None:
        """Return once nothing asks for a pause; after one, `then` is what goes on."""
        reason = self._reason(paused=False)
        if reason is None:
            return
        began, remind = time.monotonic(), Every(REMIND_S)
        told = None
        while reason is not None:
            if reason != told:
                self._say(f"Paused: {reason}.")
            if reason != told or remind.due():
                self._tell(Progress(state="paused", note=reason))
            told = reason
            self._sleep(PAUSED_LOOK_S)
            reason = self._reason(paused=True)
        self._say(f"Going on after a pause of {_duration(time.monotonic() - began)}.")
        if then is not None:
            self._tell(then)

    def _reason(self, paused: bool) -> str | None:
        return self._limits.reason(self._now().time(), paused=paused, root=self._root)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if not minutes:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
