"""Temperature, clock and power from Linux (sysfs). A figure is None if there is no sensor for it.

Each function takes the root of sysfs, so that tests can describe any machine with a folder.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiles.documents.bundle_profile import Conditions

SYS = Path("/sys")
PI_FLAGS = ("under-voltage", "frequency capped", "throttled", "soft temperature limit")
"""Bits 0 to 3 of get_throttled on a Raspberry Pi. Bits 16 to 19 have the same meaning, since the
last boot."""
SINCE_BOOT = 16
CPU_COOLING = ("cpufreq", "processor", "devfreq")
"""A cooling device slows the processor if its type in lower case contains one of these words."""
COUNTERS = "devices/system/cpu/cpu*/thermal_throttle/*_throttle_count"


@dataclass(frozen=True, kw_only=True)
class Throttle:
    """Reasons why the processor runs slower than it could.

    The reasons in `active` apply now. The reasons in `since_boot` applied at some time since the
    last boot. `events` counts how often an x86 processor has slowed itself down since the last
    boot.
    """

    active: tuple[str, ...] = ()
    since_boot: tuple[str, ...] = ()
    events: int = 0

    def new_since(self, before: "Throttle") -> tuple[str, ...]:
        """Reasons why the processor was slowed down between `before` and now; may be empty."""
        latched = [flag for flag in self.since_boot if flag not in before.since_boot]
        counted = ["processor hot"] if self.events > before.events else []
        return tuple(dict.fromkeys([*before.active, *self.active, *latched, *counted]))


def conditions(root: Path = SYS) -> "Conditions":
    """Read all sensors, for a profile."""
    from profiles.documents.bundle_profile import Conditions

    now = throttle(root)
    return Conditions(
        temperature_c=temperature_c(root),
        governor=governor(root),
        clock_hz=clock_hz(root),
        throttled=None if now is None else now.active,
        battery=battery_level(root),
        charging=charging(root),
    )


def temperature_c(root: Path = SYS) -> float | None:
    """Temperature of the hottest thermal zone in degrees Celsius."""
    degrees = [number(path) for path in root.glob("class/thermal/thermal_zone*/temp")]
    # A sensor that is switched off reports 0 or a temperature far below freezing.
    return max((value / 1000 for value in degrees if value is not None and value > 0), default=None)


def governor(root: Path = SYS) -> str | None:
    """The governor that sets the clock, such as ondemand. Commas separate several governors."""
    governors = {
        text(path) for path in root.glob("devices/system/cpu/cpu*/cpufreq/scaling_governor")
    }
    return ", ".join(sorted(name for name in governors if name)) or None


def clock_hz(root: Path = SYS) -> int | None:
    """Current clock of the fastest core, measured by the hardware or, if not, set by the kernel."""
    # cpuinfo_cur_freq is measured, but on many kernels only root can read it.
    for name in ("cpuinfo_cur_freq", "scaling_cur_freq"):
        clocks = [number(path) for path in root.glob(f"devices/system/cpu/cpu*/cpufreq/{name}")]
        if known := [value for value in clocks if value]:
            return 1000 * max(known)
    return None


def throttle(root: Path = SYS) -> Throttle | None:
    """Read why the processor is slow: Raspberry Pi flags, cooling devices, x86 counters."""
    # Each kind of machine has only some of the three sources, so all of them are combined.
    word = _pi_word(root)
    cooling = list(_cooling(root))
    events = [number(path) for path in root.glob(COUNTERS)]
    known = [count for count in events if count is not None]
    if word is None and not cooling and not known:
        return None
    flags = [(flag, word or 0, 1 << bit) for bit, flag in enumerate(PI_FLAGS)]
    return Throttle(
        active=(
            *(flag for flag, value, mask in flags if value & mask),
            *(f"{name} cools" for name, state in cooling if state > 0),
        ),
        since_boot=tuple(flag for flag, value, mask in flags if value & mask << SINCE_BOOT),
        events=sum(known),
    )


def battery_level(root: Path = SYS) -> float | None:
    """Charge of the machine's battery from 0 to 1. Several batteries give their mean."""
    levels = [number(supply / "capacity") for supply in power_supplies(root, "battery")]
    known = [value for value in levels if value is not None]
    return sum(known) / len(known) / 100 if known else None


def charging(root: Path = SYS) -> bool | None:
    """Whether the machine runs on external power, so that its battery is charging or full."""
    status = {text(supply / "status") for supply in power_supplies(root, "battery")}
    online = [
        number(supply / "online") for supply in power_supplies(root, "mains", "usb", "wireless")
    ]
    if "Discharging" in status:  # a charger may be connected but too weak
        return False
    if status & {"Charging", "Full"} or 1 in online:
        return True
    return False if 0 in online else None


def _pi_word(root: Path) -> int | None:
    """The flags of a Raspberry Pi's firmware; the folder is soc@107c000000 on a Pi 5."""
    for path in root.glob("devices/platform/soc*/soc*:firmware/get_throttled"):
        try:
            return int(text(path) or "", 16)
        except ValueError:
            continue
    return None


def _cooling(root: Path) -> Iterator[tuple[str, int]]:
    """Type and current state (0: inactive) of each cooling device that slows the processor."""
    for device in sorted(root.glob("class/thermal/cooling_device*")):
        kind, state = text(device / "type"), number(device / "cur_state")
        if kind and state is not None and any(word in kind.lower() for word in CPU_COOLING):
            yield kind, state


def power_supplies(root: Path, *kinds: str) -> Iterator[Path]:
    """Yield the machine's power supplies, but not the supplies of devices such as a mouse."""
    for supply in sorted(root.glob("class/power_supply/*")):
        kind = (text(supply / "type") or "").lower()
        if kind.startswith(kinds) and text(supply / "scope") != "Device":
            yield supply


def text(path: Path) -> str | None:
    """Content of a small file; None on an error, for example if a sensor is switched off."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def number(path: Path) -> int | None:
    """The whole number in a small file; None on an error."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None
