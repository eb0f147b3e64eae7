"""Keeps batch norm's statistics of a round's updates near their medians.

Statistics are measured, not trained: those of honest devices resemble each other, whatever the
global model holds. So each is compared with those of the same round, not with what the device
received. They are few, so those of all updates are in memory until the round's end.

For each element, let c be the median over the n updates that hold it, and d the median of the
distances to c. The mean is taken of the values within [c - d, c + d]; a value outside is moved to
the nearer end. A variance is compared by its logarithm. If n < ENOUGH, what the devices received
takes part in both medians, because two devices do not say which of them is right.

A value that only one update holds has no such comparison. It stays within o +- (ALONE u + r). o is
the global model's value. u is STATISTIC standard deviations, for a variance the logarithm of
STATISTIC. r is the furthest that ENOUGH updates have moved an element of the same tensor. If there
is no such element, r is 0. But if the variance is still 1, with which models are built, it has not
been measured yet: then r allows FIRST standard deviations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ENOUGH = 3
"""Fewer updates have no median of their own."""
STATISTIC = 4.0
"""A variance is told if it is further away than d by this factor, a mean if it is further by this
many standard deviations. Between d and that, values of honest devices are moved as well."""
ALONE = 2.0
"""Values of honest devices that were alone reached 3 deviations in a mean and a factor of 32 in a
variance, this only on few labels in the first rounds; else 1.8 and 14."""
FIRST = 1e4
"""Honest means of a first round reached 97 deviations, and deviations a factor of 78, on pixels
between 0 and 255."""
ROUNDING = 1e-6
"""A value that is further than d by less, relative to d, is not moved: c and d are rounded."""
EPSILON = 1e-5
"""Added to variances, as batch norm does."""


@dataclass(frozen=True)
class CentralMeans:
    """The means of the statistics of several updates.

    Attributes:
        means: The means by the name of a tensor, float64; NaN for elements that no update holds.
            Tensors in which no value was moved are left out.
        times: For each update, by tensor, how far it exceeded what is told; only above 1. A value
            that the update holds alone is told whenever it is moved.
    """

    means: Mapping[str, np.ndarray]
    times: Sequence[Mapping[str, float]]


def central_means(
    sent: Sequence[Mapping[str, np.ndarray]],
    weights: Sequence[float],
    shares: Sequence[float],
    received: Mapping[str, np.ndarray],
) -> CentralMeans:
    """The means of statistics, with values far from the median moved towards it.

    Args:
        sent: The statistics of each update by the name of a tensor, in the shape of the whole
            tensor; NaN for elements that the update does not hold.
        weights: The weight of each update.
        shares: For each update, the share of the way from the global model's value to its own that
            counts: 1, or less for stale updates.
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
    """The `values` of a statistic, moved if they are far; how many times each row is too far."""
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
    """The values that are moved, NaN in place of others; how many times each row is too far."""
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
    """The weighted mean over the rows, without NaN; NaN where all are."""
    held = weights * ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: np.ndarray = (held * np.nan_to_num(values)).sum(axis=0) / held.sum(axis=0)
    return mean


def _by_row(factors: Sequence[float], values: np.ndarray) -> np.ndarray:
    """One factor for each row of `values`, in a shape that multiplies whole rows."""
    return np.asarray(factors).reshape(-1, *[1] * (values.ndim - 1))


def _medians(values: np.ndarray) -> np.ndarray:
    """The median over the rows, without NaN; NaN where all are."""
    ordered = np.sort(values, axis=0)  # NaN comes last
    count = np.sum(~np.isnan(values), axis=0)
    low, high = (
        np.take_along_axis(ordered, np.maximum(at, 0)[None], axis=0)[0]
        for at in ((count - 1) // 2, count // 2)
    )
    medians: np.ndarray = low / 2 + high / 2
    return medians
