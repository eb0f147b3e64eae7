"""The energy of a training, read from made-up sysfs trees."""

from pathlib import Path

import pytest

from device_agent.system.energy import EnergyMeter
from profiles.documents.bundle_profile import Energy
from sysfs import tree

RANGE = 262_143_328_850


def rapl(number: int, energy_uj: int, name: str = "package") -> dict[str, str]:
    zone = f"class/powercap/intel-rapl:{number}"
    return {
        f"{zone}/name": f"{name}-{number}",
        f"{zone}/energy_uj": str(energy_uj),
        f"{zone}/max_energy_range_uj": str(RANGE),
    }


def battery(status: str = "Discharging", **files: int) -> dict[str, str]:
    supply = "class/power_supply/BAT0"
    found = {f"{supply}/{name}": str(value) for name, value in files.items()}
    return {**found, f"{supply}/type": "Battery", f"{supply}/status": status}


def test_counters_of_two_processors_one_of_which_begins_again(tmp_path: Path) -> None:
    meter = EnergyMeter(
        tree(tmp_path, {**rapl(0, 1_000_000), **rapl(1, RANGE - 999_999), **rapl(2, 5, "dram")})
    )
    tree(tmp_path, {**rapl(0, 13_500_000), **rapl(1, 2_000_000), **rapl(2, 10**9, "dram")})
    assert meter.used() == Energy(joules=15.5, source="processor")


def test_a_counter_that_can_no_longer_be_read(tmp_path: Path) -> None:
    meter = EnergyMeter(tree(tmp_path, rapl(0, 0)))
    (tmp_path / "class/powercap/intel-rapl:0/energy_uj").unlink()
    assert meter.used() is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"energy_now": 50_000_000}, {"energy_now": 49_000_000}),
        # 0.1 Ah at 10 V
        (
            {"charge_now": 4_000_000, "voltage_now": 10_000_000},
            {"charge_now": 3_900_000, "voltage_now": 10_000_000},
        ),
    ],
)
def test_a_battery_that_loses_a_watt_hour(
    before: dict[str, int], after: dict[str, int], tmp_path: Path
) -> None:
    meter = EnergyMeter(tree(tmp_path, battery(**before)))
    tree(tmp_path, battery(**after))
    used = meter.used()
    assert used is not None
    assert used.joules == pytest.approx(3600)
    assert used.source == "battery"
    tree(tmp_path, battery("Charging", **after))
    assert meter.used() is None
    tree(tmp_path, battery(**before) | {"class/power_supply/BAT0/energy_now": "60000000"})
    assert meter.used() is None


def test_a_machine_that_reports_no_energy(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path).used() is None
    assert EnergyMeter(tmp_path / "nowhere").used() is None
