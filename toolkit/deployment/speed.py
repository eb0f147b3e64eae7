"""Measures how long predictions of two graphs take, relative to each other."""

import statistics
import time
from collections.abc import Callable

import numpy as np

SECONDS = 0.5
"""How long each of two graphs is run, in seconds. A graph stops earlier after RUNS runs."""
RUNS = 200


def medians(
    first: Callable[[np.ndarray], object], second: Callable[[np.ndarray], object], x: np.ndarray
) -> tuple[float, float]:
    """The median times of two functions in seconds.

    The functions run in turns, after a first run of each. So other programs on the machine slow
    down both equally.
    """
    times: tuple[list[float], list[float]] = ([], [])
    first(x), second(x)
    end = time.perf_counter() + 2 * SECONDS
    while len(times[1]) < RUNS and (not times[1] or time.perf_counter() < end):
        for run, own in zip((first, second), times, strict=True):
            start = time.perf_counter()
            run(x)
            own.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])
