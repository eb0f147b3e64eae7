"""The owner's limits: when the agent has to pause."""

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from device_agent.system import sensors, system_bus
from profiles.errors import InputError

HYSTERESIS_C = 5.0
"""How far below the limit a device cools down before it continues, in degrees Celsius."""


@dataclass(frozen=True)
class QuietHours:
    """A daily time span by the local clock, including `start` and excluding `end`."""

    start: datetime.time
    end: datetime.time

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a time span like 22:00-07:00.

        Raises:
            InputError: `text` is not a time span, or both times are equal.
        """
        matched = re.fullmatch(r"(\d\d):(\d\d)-(\d\d):(\d\d)", text.strip())
        try:
            first, second, third, fourth = map(int, matched.groups() if matched else ())
            start, end = datetime.time(first, second), datetime.time(third, fourth)
        except ValueError:
            start = end = datetime.time()
        if start == end:
            raise InputError(
                "Invalid quiet hours {quiet_hours!r}: write two different times like 22:00-07:00.",
                code="option.invalid-quiet-hours",
                quiet_hours=text,
            )
        return cls(start, end)

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M}"

    def covers(self, moment: datetime.time) -> bool:
        """Whether `moment` is in the time span, which may include midnight."""
        if self.start < self.end:
            return self.start <= moment < self.end
        return moment >= self.start or moment < self.end


@dataclass(frozen=True)
class OwnerLimits:
    """Conditions under which the agent pauses.

    Attributes:
        max_temperature: Pause above this temperature, in degrees Celsius.
        only_when_charging: Pause while the device runs on battery.
        quiet_hours: Pause at this time of day.
        only_when_idle: Pause while somebody uses the device.
        only_unmetered: Pause while the network may charge for data volume.
    """

    max_temperature: float | None = None
    only_when_charging: bool = False
    quiet_hours: QuietHours | None = None
    only_when_idle: bool = False
    only_unmetered: bool = False

    def reason(
        self, now: datetime.time, *, paused: bool = False, root: Path = sensors.SYS
    ) -> str | None:
        """Find a reason to pause.

        Args:
            now: The local time.
            paused: Whether the agent is paused already. A paused agent stays paused until the
                device is `HYSTERESIS_C` below the temperature limit. Without this rule, the agent
                might pause and continue every minute.
            root: Root of sysfs.

        Returns:
            The reason in a few words, or None. If there is no sensor for temperature or power, the
            limit on this value is ignored. If it is unknown whether the machine is idle, or whether
            the network is unmetered, the agent pauses.
        """
        if self.quiet_hours is not None and self.quiet_hours.covers(now):
            return f"quiet hours until {self.quiet_hours.end:%H:%M}"
        if self.only_when_charging and sensors.charging(root) is False:
            return "running on battery"
        if self.only_when_idle and (idle := system_bus.is_idle()) is not True:
            unknown = "logind does not say whether this machine is idle"
            return "in use by somebody" if idle is False else unknown
        if self.only_unmetered and (metered := system_bus.is_metered()) is not False:
            unknown = "NetworkManager does not say whether the connection is metered"
            return "on a metered connection" if metered else unknown
        if self.max_temperature is not None:
            degrees = sensors.temperature_c(root)
            limit = self.max_temperature - (HYSTERESIS_C if paused else 0)
            if degrees is not None and degrees > limit:
                return f"warmer than {self.max_temperature:g} °C"
        return None

    def check(self, root: Path = sensors.SYS) -> None:
        """Check that this machine can enforce the limits.

        Raises:
            InputError: There is a temperature limit, but the machine has no temperature sensor. Or
                a limit needs `busctl`, but it is not installed.
        """
        if self.max_temperature is not None and sensors.temperature_c(root) is None:
            raise InputError(
                "This machine has no temperature sensor in /sys/class/thermal, so "
                "--max-temperature cannot be used. Leave this option out.",
                code="option.no-temperature-sensor",
            )
        if (self.only_when_idle or self.only_unmetered) and not system_bus.is_readable():
            raise InputError(
                "--only-when-idle and --only-unmetered ask logind and NetworkManager with "
                "`busctl`, which is not installed here. Install systemd, or leave these options "
                "out.",
                code="option.no-busctl",
            )


NO_LIMITS = OwnerLimits()
