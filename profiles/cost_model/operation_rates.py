"""The rate of one kind of operation at sizes that were not timed.

The rate is in seconds for each unit of work. If operations of a kind have one size, the rate is
interpolated between the timings. For other kinds, the logarithm of the rate is predicted: by a
plane over the logarithms of the sizes, plus a Gaussian process. Near a timed size, the Gaussian
process pulls the prediction to the timing. Far from all timed sizes, the plane alone decides.
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
"""Length scale of the Gaussian process, in doublings of a size."""
NOISE = 0.05
"""Relative noise of a timing (standard deviation)."""
SLOPE = 0.5
"""Ridge penalty on the slopes of the plane, as a number of timings."""
MOST_DOUBT = 0.5
"""Largest relative error that cross-validation may report."""


class Rates:
    """Predicts rates from the timings of one kind of operation.

    Each timing has the same number of sizes.
    """

    def __init__(self, timings: Sequence[Timing]) -> None:
        self.kind = timings[0].kind
        # np.interp needs increasing sizes.
        self.timings = sorted(timings, key=lambda t: (t.sizes, t.seconds))

    def seconds(self, sizes: Sequence[int]) -> float:
        """Time in seconds of one operation with these sizes."""
        if len(sizes) == 1:
            return self.along(sizes[0])
        # The plane must not extrapolate, so sizes are limited to the timed range.
        at = np.clip(self.point(sizes), self.points.min(axis=0), self.points.max(axis=0))[None]
        near = self.nearness(at, self.points) @ self.weights
        return amount(self.kind, sizes) * math.exp(float(self.plane(at)[0] + near[0]))

    def along(self, size: int) -> float:
        """Time in seconds of an operation whose kind has one size.

        Between timings, the time is interpolated on logarithmic axes. Above the largest timed size,
        the rate of this size is used.
        """
        sizes, seconds = zip(*((t.sizes[0], t.seconds) for t in self.timings), strict=True)
        if size > sizes[-1]:
            return float(seconds[-1] * size / sizes[-1])
        # Below the first timing, np.interp returns its time, which is an upper bound there.
        return float(np.exp(np.interp(math.log(size), np.log(sizes), np.log(seconds))))

    @cached_property
    def doubt(self) -> float:
        """Relative error of interpolated times, by leave-one-out cross-validation.

        For a kind with one size the error is 0: the curve is simple, and the timings are too far
        apart for cross-validation.
        """
        if len(self.timings[0].sizes) == 1 or len(self.timings) < 3:
            return 0.0
        # Leave-one-out residuals of a Gaussian process in closed form (Rasmussen & Williams 5.12).
        errors = self.weights / np.diag(self.inverse)
        return min(MOST_DOUBT, float(np.sqrt(np.mean(errors**2))))

    def point(self, sizes: Sequence[int]) -> list[float]:
        """Coordinates of an operation of these sizes, as logarithms to base 2.

        The total amount of work replaces the first size (the number of images or matrices). Its
        coordinate is halved, because the time for one image hardly depends on the number of images.
        """
        return [0.5 * math.log2(amount(self.kind, sizes)), *map(math.log2, sizes[1:])]

    @cached_property
    def points(self) -> Numbers:
        """Coordinates of the timings, (timings, sizes)."""
        return np.array([self.point(t.sizes) for t in self.timings])

    @cached_property
    def logs(self) -> Numbers:
        """Logarithms of the timed rates, (timings,)."""
        return np.array([math.log(t.seconds / amount(t.kind, t.sizes)) for t in self.timings])

    @cached_property
    def coefficients(self) -> Numbers:
        """Coefficients of the plane around the mean point, constant first, by ridge regression."""
        design = np.column_stack(
            [np.ones(len(self.points)), self.points - self.points.mean(axis=0)]
        )
        # The penalty keeps slopes near 0 if there are few timings; the constant is not penalised.
        penalty = np.diag([0.0, *[SLOPE] * self.points.shape[1]])
        return np.linalg.solve(design.T @ design + penalty, design.T @ self.logs)

    def plane(self, points: Numbers) -> Numbers:
        """Logarithm of the rate on the plane at `points`, (points,)."""
        around = points - self.points.mean(axis=0)
        return np.asarray(self.coefficients[0] + around @ self.coefficients[1:])

    @cached_property
    def residuals(self) -> Numbers:
        """Difference between the timed rates and the plane, (timings,)."""
        return np.asarray(self.logs - self.plane(self.points))

    @cached_property
    def variance(self) -> float:
        """Variance of the residuals."""
        return max(NOISE**2, float(np.var(self.residuals)))

    def nearness(self, left: Numbers, right: Numbers) -> Numbers:
        """Covariance between the residuals at the points `left` and `right`, (left, right)."""
        squares = ((left[:, None] - right[None]) ** 2).sum(axis=2)
        return np.asarray(self.variance * np.exp(-0.5 * squares / LENGTH**2))

    @cached_property
    def inverse(self) -> Numbers:
        """Inverse of the covariance of the timings, including noise, (timings, timings)."""
        noise = NOISE**2 * np.eye(len(self.logs))
        return np.asarray(np.linalg.inv(self.nearness(self.points, self.points) + noise), float)

    @cached_property
    def weights(self) -> Numbers:
        """Weight of each timing in a prediction, (timings,)."""
        return np.asarray(self.inverse @ self.residuals, float)
