"""Quiet hours against each minute of a day; heat and power with made-up trees of sysfs."""

import json
from datetime import datetime, time, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundles import BundleOf
from device_agent.federation.owner_limits import OwnerLimits, QuietHours
from device_agent.federation.owner_pauses import Pauses
from device_agent.formats.protocol.rounds import Progress
from refusals import refused
from trainings import train_bundle

NOON = datetime(2026, 6, 1, 12)
minutes = st.integers(0, 24 * 60 - 1)


def clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


@given(start=minutes, length=st.integers(1, 24 * 60 - 1))
def test_quiet_hours_are_the_minutes_from_start_to_end(start: int, length: int) -> None:
    end = (start + length) % (24 * 60)
    hours = QuietHours.parse(f"{clock(start)}-{clock(end)}")
    midnight = datetime(2026, 1, 1)
    quiet = {
        moment.hour * 60 + moment.minute
        for moment in (midnight + timedelta(minutes=m) for m in range(24 * 60))
        if hours.covers(moment.time())
    }
    assert quiet == {(start + step) % (24 * 60) for step in range(length)}
    assert QuietHours.parse(str(hours)) == hours


def test_the_second_before_and_at_the_end() -> None:
    hours = QuietHours.parse("22:00-07:00")
    assert [hours.covers(time(*t)) for t in ((21, 59, 59), (22,), (0,), (6, 59, 59), (7,))] == [
        False, True, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["22-7", "22:00", "22:00-22:00", "25:00-07:00", "a:bc-de:fg", ""])
def test_invalid_quiet_hours(text: str) -> None:
    with refused("option.invalid-quiet-hours", quiet_hours=text):
        QuietHours.parse(text)


def machine(root: Path, celsius: float | None = None, mains: int | None = None) -> Path:
    """A tree like /sys, for a machine with this temperature and on or off external power."""
    root.mkdir(exist_ok=True)
    if celsius is not None:
        zone = root / "class/thermal/thermal_zone0"
        zone.mkdir(parents=True, exist_ok=True)
        (zone / "temp").write_text(f"{celsius * 1000:.0f}\n")
    if mains is not None:
        supply = root / "class/power_supply/AC"
        supply.mkdir(parents=True, exist_ok=True)
        (supply / "type").write_text("Mains\n")
        (supply / "online").write_text(f"{mains}\n")
    return root


def test_reasons(tmp_path: Path) -> None:
    limits = OwnerLimits(70, True, QuietHours.parse("22:00-07:00"))
    day, night = time(12), time(23)
    assert limits.reason(day, root=machine(tmp_path / "bare")) is None
    assert limits.reason(night, root=tmp_path / "bare") == "quiet hours until 07:00"
    assert limits.reason(day, root=machine(tmp_path / "off", 40, 0)) == "running on battery"
    assert limits.reason(day, root=machine(tmp_path / "on", 40, 1)) is None
    assert limits.reason(day, root=machine(tmp_path / "on", 71)) == "warmer than 70 °C"
    assert limits.reason(day, root=machine(tmp_path / "on", 69)) is None
    assert limits.reason(day, root=tmp_path / "on", paused=True) == "warmer than 70 °C"
    assert OwnerLimits().reason(night, root=machine(tmp_path / "on", 200, 0)) is None


@pytest.mark.parametrize(
    ("limits", "answer", "reason"),
    [
        (OwnerLimits(only_when_idle=True), "b true", None),
        (OwnerLimits(only_when_idle=True), "b false", "in use by somebody"),
        (OwnerLimits(only_when_idle=True), "", "logind does not say whether this machine is idle"),
        (OwnerLimits(only_unmetered=True), "u 1", "on a metered connection"),
        (OwnerLimits(only_unmetered=True), "u 2", None),
        (OwnerLimits(only_unmetered=True), "u 3", "on a metered connection"),
        (OwnerLimits(only_unmetered=True), "u 4", None),
        (
            OwnerLimits(only_unmetered=True),
            "u 0",
            "NetworkManager does not say whether the connection is metered",
        ),
        (OwnerLimits(), "u 1", None),
    ],
)
def test_what_the_system_bus_tells(
    limits: OwnerLimits,
    answer: str,
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`busctl` printed these answers for logind and NetworkManager of python-dbusmock 0.28."""
    wanted = "IdleHint" if limits.only_when_idle else "Metered"
    fake = tmp_path / "busctl"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *" {wanted}") echo "{answer}";; *) exit 1;; esac\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    limits.check(tmp_path)
    assert limits.reason(time(12), root=tmp_path) == reason


@pytest.mark.parametrize(
    "limits", [OwnerLimits(only_when_idle=True), OwnerLimits(only_unmetered=True)]
)
def test_without_busctl_the_limits_cannot_be_kept(
    limits: OwnerLimits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("option.no-busctl"):
        limits.check(tmp_path)
    assert limits.reason(time(12), root=tmp_path) is not None


def test_a_pause_is_reported_once_and_ends(tmp_path: Path, said: list[str]) -> None:
    heat, told = [80.0, 75.0, 68.0, 60.0], list[Progress]()

    def sleep(seconds: float) -> None:
        machine(tmp_path, heat.pop(0))

    machine(tmp_path, 90)
    pauses = Pauses(OwnerLimits(max_temperature=70), told.append, sleep, lambda: NOON, tmp_path)
    pauses.wait(Progress(state="training", loss=1.0))
    assert heat == []
    assert said == ["Paused: warmer than 70 °C.", "Continuing after a pause of 0 s."]
    assert told == [
        Progress(state="paused", note="warmer than 70 °C"),
        Progress(state="training", loss=1.0),
    ]
    pauses.wait()
    assert len(said) == 2


def test_a_limit_that_cannot_be_kept(tmp_path: Path) -> None:
    with refused("option.no-temperature-sensor"):
        OwnerLimits(max_temperature=70).check(tmp_path)


def test_training_can_be_delayed_before_each_batch(
    bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    calls: list[float] = []
    folder = bundle_of("slice")
    update = train_bundle(
        folder, data, tmp_path / "update", threads=1, on_batch=lambda: calls.append(1)
    )
    schedule = json.loads((folder / "manifest.json").read_bytes())["schedule"]
    recorded = sum(step["do"] == "record" for step in schedule)
    (size,) = {step["batch_size"] for step in schedule if step["do"] == "train"}
    assert recorded > 0
    batches = 21 // size + (21 % size > 1)  # a single sample at the end joins the batch before
    assert len(calls) == update.record.steps + recorded * batches


def test_a_clock_that_jumps_back(tmp_path: Path, said: list[str]) -> None:
    """The clock leaves the quiet hours and jumps back into them."""
    times = [time(23), time(23, 30), time(12), time(23), time(12)]
    pauses = Pauses(
        OwnerLimits(quiet_hours=QuietHours.parse("22:00-07:00")),
        lambda progress: None,
        lambda seconds: None,
        lambda: datetime.combine(NOON, times.pop(0)),
        tmp_path,
    )
    pauses.wait()
    pauses.wait()
    assert times == []
    assert [line[:7] for line in said] == ["Paused:", "Continu"] * 2
