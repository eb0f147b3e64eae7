"""Energy that a machine uses, from Linux: RAPL counters of x86 processors, or a battery.

Each class takes the root of sysfs, so that tests can describe any machine with a folder.
"""

from pathlib import Path

from device_agent.system.sensors import SYS, charging, number, power_supplies, text
from profiles.documents.bundle_profile import Energy

PACKAGES = "class/powercap/intel-rapl:*"
"""The name of the counters, also on AMD processors. Often only root can read them."""


class EnergyMeter:
    """Measures the energy that the machine has used since this object was created.

    A processor's counter does not include memory, screen and radio. A battery shows the energy of
    the whole machine, but in large steps, and only while it is not charged. Both sources include
    all other programs.

    Args:
        root: The root of sysfs.
    """

    def __init__(self, root: Path = SYS) -> None:
        self._root = root
        self._packages = _packages(root)
        self._stored = _stored_j(root)

    def used(self) -> Energy | None:
        """The energy since this object was created; None if the machine does not report it."""
        now = _packages(self._root)
        if self._packages and now.keys() >= self._packages.keys():
            # A counter starts again at 0 after its range.
            used = sum(
                (now[package][0] - begun) % size
                for package, (begun, size) in self._packages.items()
            )
            return Energy(joules=used / 1e6, source="processor")
        left = _stored_j(self._root)
        if self._stored is None or left is None or left > self._stored:
            return None
        return Energy(joules=self._stored - left, source="battery")


def _packages(root: Path) -> dict[str, tuple[int, int]]:
    """Each processor's counter and its range, in microjoules."""
    found = {}
    for zone in root.glob(PACKAGES):
        counter, largest = number(zone / "energy_uj"), number(zone / "max_energy_range_uj")
        is_package = (text(zone / "name") or "").startswith("package")
        if is_package and counter is not None and largest:
            found[zone.name] = counter, largest + 1
    return found


def _stored_j(root: Path) -> float | None:
    """The energy in all batteries, in joules; None if it is unknown or something charges them."""
    stored = []
    for supply in power_supplies(root, "battery"):
        energy = number(supply / "energy_now")  # in microwatt-hours
        charge, volts = number(supply / "charge_now"), number(supply / "voltage_now")
        if energy is not None:
            stored.append(energy * 3600e-6)
        elif charge is not None and volts is not None:
            stored.append(charge * 3600e-6 * volts * 1e-6)
    return sum(stored) if stored and charging(root) is False else None
