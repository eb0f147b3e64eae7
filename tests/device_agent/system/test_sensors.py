"""Heat, clock and power, read from made-up sysfs trees of the machines that agents run on."""

from pathlib import Path

import pytest

from device_agent.system import sensors
from device_agent.system.sensors import Throttle
from sysfs import tree

CPU = "devices/system/cpu/cpu{}/cpufreq/{}"
FIRMWARE = "devices/platform/soc/soc:firmware/get_throttled"


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    read = (
        sensors.temperature_c, sensors.governor, sensors.clock_hz, sensors.throttle,
        sensors.battery_level, sensors.charging,
    )  # fmt: skip
    assert [sensor(tmp_path) for sensor in read] == [None] * 6
    assert [sensor(tmp_path / "nowhere") for sensor in read] == [None] * 6


def test_the_hottest_zone_counts_and_a_dead_one_does_not(tmp_path: Path) -> None:
    zones = {f"class/thermal/thermal_zone{n}/temp": t for n, t in enumerate(["48312", "61200"])}
    dead = {"class/thermal/thermal_zone2/temp": "-274000", "class/thermal/thermal_zone3/temp": ""}
    assert sensors.temperature_c(tree(tmp_path, {**zones, **dead})) == 61.2


def test_clock_and_governor_of_big_and_little_cores(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            CPU.format(0, "scaling_governor"): "schedutil",
            CPU.format(4, "scaling_governor"): "performance",
            CPU.format(0, "scaling_cur_freq"): "1800000",
            CPU.format(4, "scaling_cur_freq"): "2400000",
        },
    )
    assert sensors.governor(root) == "performance, schedutil"
    assert sensors.clock_hz(root) == 2_400_000_000
    tree(root, {CPU.format(0, "cpuinfo_cur_freq"): "1500000"})
    assert sensors.clock_hz(root) == 1_500_000_000


@pytest.mark.parametrize(
    ("word", "active", "since_boot"),
    [
        ("0", (), ()),
        # 0x50005 is the example of Raspberry Pi's documentation: under-voltage and throttled, both
        # now and before.
        ("50005", ("under-voltage", "throttled"), ("under-voltage", "throttled")),
        ("e0000", (), ("frequency capped", "throttled", "soft temperature limit")),
        ("8", ("soft temperature limit",), ()),
    ],
)
def test_flags_of_a_raspberry_pi(
    tmp_path: Path, word: str, active: tuple[str, ...], since_boot: tuple[str, ...]
) -> None:
    expected = Throttle(active=active, since_boot=since_boot)
    assert sensors.throttle(tree(tmp_path / "4", {FIRMWARE: word})) == expected
    fifth = "devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled"
    assert sensors.throttle(tree(tmp_path / "5", {fifth: word})) == expected


def test_cooling_of_the_processor_and_counters(tmp_path: Path) -> None:
    counter = "devices/system/cpu/cpu{}/thermal_throttle/core_throttle_count"
    root = tree(
        tmp_path,
        {
            "class/thermal/cooling_device0/type": "pwm-fan",
            "class/thermal/cooling_device0/cur_state": "3",
            "class/thermal/cooling_device1/type": "thermal-cpufreq-0",
            "class/thermal/cooling_device1/cur_state": "0",
            counter.format(0): "2",
            counter.format(1): "5",
        },
    )
    assert sensors.throttle(root) == Throttle(events=7)
    tree(root, {"class/thermal/cooling_device1/cur_state": "1"})
    assert sensors.throttle(root) == Throttle(active=("thermal-cpufreq-0 cools",), events=7)


def test_what_set_in_since() -> None:
    calm = Throttle(since_boot=("under-voltage",), events=3)
    assert calm.new_since(calm) == ()
    later = Throttle(since_boot=("under-voltage", "throttled"), events=3)
    assert later.new_since(calm) == ("throttled",)
    assert Throttle(active=("throttled",)).new_since(Throttle()) == ("throttled",)
    assert Throttle().new_since(Throttle(active=("throttled",))) == ("throttled",)
    assert Throttle(events=4).new_since(calm) == ("processor hot",)


@pytest.mark.parametrize(
    ("status", "online", "charging"),
    [
        ("Charging", "1", True),
        ("Full", "1", True),
        ("Not charging", "1", True),
        ("Discharging", "0", False),
        ("Discharging", "1", False),
        ("Unknown", "0", False),
    ],
)
def test_battery(tmp_path: Path, status: str, online: str, charging: bool) -> None:
    root = tree(
        tmp_path,
        {
            "class/power_supply/BAT0/type": "Battery",
            "class/power_supply/BAT0/status": status,
            "class/power_supply/BAT0/capacity": "83",
            "class/power_supply/AC/type": "Mains",
            "class/power_supply/AC/online": online,
            "class/power_supply/mouse/type": "Battery",
            "class/power_supply/mouse/scope": "Device",
            "class/power_supply/mouse/status": "Discharging",
            "class/power_supply/mouse/capacity": "5",
        },
    )
    assert (sensors.battery_level(root), sensors.charging(root)) == (0.83, charging)


def test_external_power_without_a_battery(tmp_path: Path) -> None:
    supply = {"class/power_supply/usb/type": "USB_PD", "class/power_supply/usb/online": "1"}
    root = tree(tmp_path, supply)
    assert (sensors.battery_level(root), sensors.charging(root)) == (None, True)
