"""Repeats a step for many minutes, to show whether a device slows down when it gets warm."""

import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from device_agent.system import sensors
from profiles.documents.bundle_profile import Point, Sustained
from profiles.documents.timing_statistics import duration

Action = Callable[[], object]
POINTS = 60
"""Number of intervals in the report of a sustained run. Each is at least one second long."""
MINUTE_S = 60.0
"""Length of the two windows, at the start and the end of a sustained run, that are compared."""


def seconds_of(action: Action) -> float:
    """Duration of one run of `action` in seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def sustain(action: Action, lasting_s: float, sysfs: Path) -> Sustained:
    """Repeat `action` for `lasting_s` seconds, but at least twice."""
    starts, durations = array("d"), array("d")
    interval_s = max(lasting_s / POINTS, 1.0)
    readings: dict[int, tuple[float | None, int | None]] = {}
    start = time.perf_counter()
    while (begun := time.perf_counter() - start) < lasting_s or len(durations) < 2:
        durations.append(seconds_of(action))
        starts.append(begun)
        interval = int(begun // interval_s)
        if interval not in readings:
            readings[interval] = sensors.temperature_c(sysfs), sensors.clock_hz(sysfs)
    return summarise(np.asarray(starts), np.asarray(durations), interval_s, readings)


def summarise(
    starts: np.ndarray,
    durations: np.ndarray,
    interval_s: float,
    readings: dict[int, tuple[float | None, int | None]],
) -> Sustained:
    """Summarise a sustained run.

    Args:
        starts: Start of each step, in seconds after the start of the run.
        durations: Duration of each step in seconds.
        interval_s: Length in seconds of the intervals to report.
        readings: Temperature and clock rate in each interval in which a step started.

    Returns:
        The step times at the start, at the end, and in each interval.
    """
    total = float(starts[-1] + durations[-1])
    # For a run shorter than two minutes, the two halves are compared.
    window = min(MINUTE_S, total / 2)
    late = starts + durations > total - window
    return Sustained(
        duration_s=total,
        window_s=window,
        first=duration(durations[starts < window]),
        last=duration(durations[late]),
        points=tuple(
            Point(
                at_s=number * interval_s,
                step=duration(durations[starts // interval_s == number]),
                temperature_c=temperature,
                clock_hz=clock,
            )
            for number, (temperature, clock) in readings.items()
        ),
    )
