"""How long a graph's operations take on a calibrated device, and how sure that is.

Of each kind the logarithm of the rate (seconds per amount) is interpolated between the timed sizes by
a Gaussian process in the logarithms of the sizes: smooth, exact far from nothing, and back at the
kind's mean rate far from everything.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from profiles.calibration import Calibration, Timing
from profiles.workload import FREE, LOOP, PRODUCTS, Operation, amount

LENGTH = 3.0
"""Over how many doublings of a size a rate says something of its neighbours'."""
NOISE = 0.05
"""Spread of a timing, relative."""


@dataclass(frozen=True)
class Rates:
    """The timings of one kind; see the module."""

    timings: Sequence[Timing]

    @cached_property
    def places(self) -> np.ndarray:
        """Logarithms of the sizes, (timings, sizes)."""
        return np.array([place(t.kind, t.sizes) for t in self.timings])

    @cached_property
    def logs(self) -> np.ndarray:
        """Logarithms of the rates, (timings,)."""
        return np.array([math.log(t.seconds / amount(t.kind, t.sizes)) for t in self.timings])

    @cached_property
    def trend(self) -> np.ndarray:
        """Rates as a plane over the places, by ridge regression: constant first."""
        design = np.column_stack([np.ones(len(self.places)), self.places - self.centre])
        penalty = np.diag([1e-6, *[0.5] * self.places.shape[1]])
        return np.linalg.solve(design.T @ design + penalty, design.T @ self.logs)

    @cached_property
    def centre(self) -> np.ndarray:
        """Mean of the places."""
        return self.places.mean(axis=0)

    def on_trend(self, places: np.ndarray) -> np.ndarray:
        """The plane's rates at `places`."""
        return self.trend[0] + (places - self.centre) @ self.trend[1:]

    @cached_property
    def covariance(self) -> np.ndarray:
        """Between the timings."""
        scale = max(0.05, float(np.std(self.logs - self.on_trend(self.places))))
        return scale**2 * nearness(self.places, self.places)

    @cached_property
    def inverse(self) -> np.ndarray:
        """Of the covariance with noise."""
        return np.linalg.inv(self.covariance + NOISE**2 * np.eye(len(self.logs)))

    def seconds(self, sizes: Sequence[int]) -> float:
        """Predicted time of one operation of these sizes."""
        kind = self.timings[0].kind
        if len(sizes) == 1:
            return self.along(sizes[0])
        at = np.clip(place(kind, sizes), self.places.min(axis=0), self.places.max(axis=0))[None]
        scale = max(0.05, float(np.std(self.logs - self.on_trend(self.places))))
        residual = self.logs - self.on_trend(self.places)
        log = self.on_trend(at) + scale**2 * nearness(at, self.places) @ self.inverse @ residual
        return amount(kind, sizes) * math.exp(float(log[0]))

    def along(self, size: int) -> float:
        """Seconds of a kind with one size: straight between the timings, rates held beyond them."""
        own = sorted((t.sizes[0], t.seconds) for t in self.timings)
        sizes, seconds = zip(*own, strict=True)
        if size > sizes[-1]:
            return float(seconds[-1] * size / sizes[-1])
        return float(np.exp(np.interp(math.log(size), np.log(sizes), np.log(seconds))))

    def left_out(self) -> np.ndarray:
        """Logarithm of true over predicted rate of each timing, were it not among them."""
        residual = self.logs - self.on_trend(self.places)
        return (self.inverse @ residual) / np.diag(self.inverse)


def place(kind: str, sizes: Sequence[int]) -> list[float]:
    """Where an operation is among those of its kind: binary logarithms of its sizes and amount."""
    logs = [math.log2(size) for size in sizes]
    # How many images there are hardly changes what one takes; the whole amount may.
    return [0.5 * math.log2(amount(kind, sizes)), *logs[1:]]


def nearness(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Between 0 and 1, for each pair of places."""
    squares = ((left[:, None] - right[None]) ** 2).sum(axis=2)
    return np.exp(-0.5 * squares / LENGTH**2)
