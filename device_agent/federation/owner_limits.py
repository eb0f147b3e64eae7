"""What the owner of a device allows it to do: when it has to pause."""

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from device_agent.system import sensors
from profiles.errors import InputError

COOLER_C = 5.0
"""How much below the limit a device cools down before it goes on, in degrees Celsius."""


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
