"""Statistics of measured times, and the clock that measures them."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from profiles.documents.bundle_profile import Duration


def duration(seconds: Sequence[float] | np.ndarray) -> Duration:
    """Median, p10 and p90 of measured run times in seconds."""
    p10, median, p90 = np.percentile(seconds, [10, 50, 90])
    return Duration(median_s=float(median), p10_s=float(p10), p90_s=float(p90), runs=len(seconds))


def clock() -> str:
    """Name of the clock that measures the times."""
    return time.get_clock_info("perf_counter").implementation


def now() -> str:
    """The current time in UTC, as ISO 8601 with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
