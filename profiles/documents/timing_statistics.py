"""Spread of measured times, and the settings that a time is measured under."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from profiles.documents.bundle_profile import Duration


def duration(seconds: Sequence[float] | np.ndarray) -> Duration:
    """Median and spread of measured run times."""
    p10, median, p90 = np.percentile(seconds, [10, 50, 90])
    return Duration(median_s=float(median), p10_s=float(p10), p90_s=float(p90), runs=len(seconds))


def clock() -> str:
    """What the times are read from."""
    return time.get_clock_info("perf_counter").implementation


def now() -> str:
    """This moment in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
