"""Keeps batch norm's statistics of a round's updates near their medians.

Statistics are measured, not trained: the statistics of honest devices resemble each other, whatever
the global model contains. So the statistics of an update are compared with the statistics of the
same round, not with the values that the device received. Statistics are few numbers, so the
statistics of all updates stay in memory until the end of the round.

For each element, let c be the median over the n updates that contain it, and d the median of the
distances to c. A value outside of [c - d, c + d] is moved to the nearer end; then the mean is
taken. A variance is compared by its logarithm. If n < ENOUGH, the received value takes part in both
medians, because two values do not show which of them is right.

A value that only one update contains cannot be compared in this way. This value stays within
o +- (ALONE u + r). o is the global model's value. u is STATISTIC standard deviations, or for a
variance the logarithm of STATISTIC. r is the largest move of an element of the same tensor by
ENOUGH updates; if there is no such element, r is 0. If the variance still has its initial value 1,
it has not been measured yet. Then r allows FIRST standard deviations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ENOUGH = 3
"""Fewer updates have no median of their own."""
STATISTIC = 4.0
"""A moved variance is reported if its distance exceeds d by this factor. A moved mean is reported
if its distance exceeds d by this many standard deviations. At smaller distances, values of honest
devices are moved as well."""
ALONE = 2.0
"""An honest value that only one device sent moved by at most 3 deviations (a mean) or a factor of
32 (a variance), in first rounds with few labels. In other cases, it moved by at most 1.8 deviations
or a factor of 14."""
FIRST = 1e4
"""On pixels between 0 and 255, honest means of a first round reached 97 deviations, and honest
deviations reached a factor of 78."""
ROUNDING = 1e-6
"""A value is not moved if its distance exceeds d by less than this share of d, because c and d are
rounded."""
EPSILON = 1e-5
"""Added to variances, as batch norm does."""


@dataclass(frozen=True)
class CentralMeans:
    """The means of the statistics of several updates.

    Attributes:
        means: The means by the name of a tensor, float64; NaN for elements that no update contains.
            Tensors in which no value was moved are left out.
        times: For each update, by tensor, the factor by which the update exceeded the limit for
            reports. Only factors above 1 are listed. A value that only this update contains is
            reported whenever it is moved.
    """

    means: Mapping[str, np.ndarray]
    times: Sequence[Mapping[str, float]]


def central_means(
    sent: Sequence[Mapping[str, np.ndarray]],
    weights: Sequence[float],
    shares: Sequence[float],
    received: Mapping[str, np.ndarray],
) -> CentralMeans:
    """The means of statistics, after values far from the median were moved towards it.

    Args:
        sent: The statistics of each update by the name of a tensor, in the shape of the whole
            tensor; NaN for elements that the update does not contain.
        weights: The weight of each update.
        shares: For each update, the share of its change from the global model's values that counts:
            1, or less for stale updates.
        received: The global model's statistics.
    """
    means: dict[str, np.ndarray] = {}
    times: list[dict[str, float]] = [{} for _ in sent]
    for name in sorted({name for own in sent for name in own}):
        rows = [row for row, own in enumerate(sent) if name in own]
        values = np.stack([sent[row][name] for row in rows]).astype(np.float64)
        near, far = _near(name, values, received)
        for row, own_far in zip(rows, far, strict=True):
            if own_far > 1:
                times[row][name] = own_far
        if not np.array_equal(near, values, equal_nan=True):
            old = received[name].astype(np.float64)
            counted = old + _by_row([shares[row] for row in rows], near) * (near - old)
            means[name] = _mean(counted, _by_row([weights[row] for row in rows], near))
    return CentralMeans(means, times)


def variance_beside(name: str) -> str:
    """The name of the variance that belongs to the statistic `name`, or `name` itself."""
    return name.removesuffix("running_mean").removesuffix("running_var") + "running_var"


def _near(
    name: str, values: np.ndarray, received: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, list[float]]:
    """The `values` of a statistic, moved if too far, and by which factor each row is too far."""
    old, variance = (received[key].astype(np.float64) for key in (name, variance_beside(name)))
    built = variance == 1
    if variance_beside(name) != name:
        deviation = np.sqrt(variance + EPSILON)
        first = FIRST * deviation * built
        moved, far = _toward_median(values, old, STATISTIC * deviation, first)
    else:
        unit = np.full(old.shape, math.log(STATISTIC))
        first = 2 * math.log(FIRST) * built
        moved, far = _toward_median(np.log(values + EPSILON), np.log(old + EPSILON), unit, first)
        moved = np.maximum(np.exp(moved) - EPSILON, 0.0)
    return np.where(np.isnan(moved), values, moved), far


def _toward_median(
    values: np.ndarray, old: np.ndarray, unit: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, list[float]]:
    """The moved values, with NaN for other values, and the factor by which each row is too far."""
    count = np.sum(~np.isnan(values), axis=0)
    few, alone = count < ENOUGH, count == 1
    voters = np.concatenate([values, np.where(few, old, np.nan)[None]])
    center = _medians(voters)
    spread = _medians(np.abs(voters - center))
    if alone.any():
        reach = first if few.all() else np.abs(center - old)[~few].max()
        center = np.where(alone, old, center)
        spread = np.where(alone, ALONE * unit + reach, spread)
        unit = np.where(alone, 0.0, unit)
    distances = np.abs(values - center)
    is_far = distances > spread * (1 + ROUNDING)
    moved = np.where(is_far, np.clip(values, center - spread, center + spread), np.nan)
    far = np.nan_to_num(distances / (unit + spread))
    return moved, far.reshape(len(values), -1).max(axis=1, initial=0.0).tolist()


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighted mean over the rows, ignoring NaN; NaN where all rows are NaN."""
    held = weights * ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: np.ndarray = (held * np.nan_to_num(values)).sum(axis=0) / held.sum(axis=0)
    return mean


def _by_row(factors: Sequence[float], values: np.ndarray) -> np.ndarray:
    """One factor for each row of `values`, in a shape that multiplies whole rows."""
    return np.asarray(factors).reshape(-1, *[1] * (values.ndim - 1))


def _medians(values: np.ndarray) -> np.ndarray:
    """The median over the rows, ignoring NaN; NaN where all rows are NaN."""
    ordered = np.sort(values, axis=0)  # NaN comes last
    count = np.sum(~np.isnan(values), axis=0)
    low, high = (
        np.take_along_axis(ordered, np.maximum(at, 0)[None], axis=0)[0]
        for at in ((count - 1) // 2, count // 2)
    )
    medians: np.ndarray = low / 2 + high / 2
    return medians
