"""The rate of one kind of operation at sizes that were not timed.

A kind of one size is interpolated between its timings. Of others the logarithm of the rate (seconds
for each amount) is a plane over the logarithms of the sizes plus a Gaussian process: at a timing it
says what was timed, but for noise, and far from all of them what the plane says.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from profiles.cost_model.workload import amount
from profiles.documents.calibration_record import Timing

Numbers = NDArray[np.float64]

LENGTH = 3.0
"""Over how many doublings of a size a rate says something of its neighbours'."""
NOISE = 0.05
"""Spread of a timing, relative."""
SLOPE = 0.5
"""How much the plane is held level, in timings."""
MOST_DOUBT = 0.5


class Rates:
    """Timings of one kind, all with as many sizes."""

    def __init__(self, timings: Sequence[Timing]) -> None:
        self.kind = timings[0].kind
        self.timings = sorted(timings, key=lambda t: (t.sizes, t.seconds))

    def seconds(self, sizes: Sequence[int]) -> float:
        """Time of one operation of these sizes."""
        if len(sizes) == 1:
            return self.along(sizes[0])
        at = np.clip(self.place(sizes), self.places.min(axis=0), self.places.max(axis=0))[None]
        near = self.nearness(at, self.places) @ self.weights
        return amount(self.kind, sizes) * math.exp(float(self.plane(at)[0] + near[0]))

    def along(self, size: int) -> float:
        """Seconds of a kind of one size: straight between the timings, rates held beyond them."""
        sizes, seconds = zip(*((t.sizes[0], t.seconds) for t in self.timings), strict=True)
        if size > sizes[-1]:
            return float(seconds[-1] * size / sizes[-1])
        return float(np.exp(np.interp(math.log(size), np.log(sizes), np.log(seconds))))

    @cached_property
    def doubt(self) -> float:
        """Relative error of what is said between timings, from each predicted by the others.

        Of one size neighbours are too far apart for that, and its curve is simple: none.
        """
        if len(self.timings[0].sizes) == 1 or len(self.timings) < 3:
            return 0.0
        errors = self.weights / np.diag(self.inverse)
        return min(MOST_DOUBT, float(np.sqrt(np.mean(errors**2))))

    def place(self, sizes: Sequence[int]) -> list[float]:
        """Where an operation is among those of its kind, in doublings.

        How many images or matrices there are hardly changes what each takes: the whole amount
        stands in for it, at half weight.
        """
        return [0.5 * math.log2(amount(self.kind, sizes)), *map(math.log2, sizes[1:])]

    @cached_property
    def places(self) -> Numbers:
        """Of the timings, (timings, sizes)."""
        return np.array([self.place(t.sizes) for t in self.timings])

    @cached_property
    def logs(self) -> Numbers:
        """Logarithms of the timed rates, (timings,)."""
        return np.array([math.log(t.seconds / amount(t.kind, t.sizes)) for t in self.timings])

    @cached_property
    def coefficients(self) -> Numbers:
        """Of the plane around the mean place, constant first, by ridge regression."""
        design = np.column_stack(
            [np.ones(len(self.places)), self.places - self.places.mean(axis=0)]
        )
        penalty = np.diag([0.0, *[SLOPE] * self.places.shape[1]])
        return np.linalg.solve(design.T @ design + penalty, design.T @ self.logs)

    def plane(self, places: Numbers) -> Numbers:
        """What the plane says at `places`."""
        around = places - self.places.mean(axis=0)
        return np.asarray(self.coefficients[0] + around @ self.coefficients[1:])

    @cached_property
    def residuals(self) -> Numbers:
        """What the plane leaves of the timed rates."""
        return np.asarray(self.logs - self.plane(self.places))

    @cached_property
    def variance(self) -> float:
        """Of the residuals."""
        return max(NOISE**2, float(np.var(self.residuals)))

    def nearness(self, left: Numbers, right: Numbers) -> Numbers:
        """Covariance of the residuals at two sets of places."""
        squares = ((left[:, None] - right[None]) ** 2).sum(axis=2)
        return np.asarray(self.variance * np.exp(-0.5 * squares / LENGTH**2))

    @cached_property
    def inverse(self) -> Numbers:
        """Of the timings' covariance with their noise."""
        noise = NOISE**2 * np.eye(len(self.logs))
        return np.asarray(np.linalg.inv(self.nearness(self.places, self.places) + noise), float)

    @cached_property
    def weights(self) -> Numbers:
        """What each timing adds, by its nearness."""
        return np.asarray(self.inverse @ self.residuals, float)
