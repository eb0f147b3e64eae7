"""The range of the numbers in a sample. Random samples are drawn from this range.

Without a range, random samples are standard normal numbers. A model that uses some numbers as ids,
for example for an embedding, fails on such samples. The user gives the range, or the range is taken
from real samples.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:  # a service reports to systemd before it loads NumPy
    import numpy as np

MOST_INTERVALS = 1024
"""A sample with more numbers gets one interval for all positions of its longest axes."""
SPREAD = 0.1
"""A number that is not whole and is the same in all real samples varies by this share in random
ones."""

Finite = Annotated[float, Meta(ge=-3.4e38, le=3.4e38)]


class Interval(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The range of `count` successive numbers of a sample.

    Random numbers are uniform from `low` to `high`. If `whole` is true, they are whole. Without
    `low` and `high`, they are standard normal.
    """

    low: Finite | None = None
    high: Finite | None = None
    whole: bool = False
    count: Annotated[int, Meta(ge=1, lt=2**53)] = 1


InputRange = tuple[Interval, ...]
"""Intervals for the numbers of a sample in C order. They repeat until each number has an
interval."""

Draw = Callable[[tuple[int, ...]], "np.ndarray"]
"""Draws random numbers in a shape."""


def draw_samples(
    input_range: InputRange, shape: tuple[int, ...], uniform: Draw, normal: Draw
) -> "np.ndarray":
    """Draw samples whose numbers are in their intervals.

    Args:
        input_range: The intervals; they must fit the sample, see `fits`.
        shape: Shape of the batch (n, *sample shape).
        uniform: Draws numbers from 0 to 1.
        normal: Draws standard normal numbers.

    Returns:
        An array of `shape`, float64.

    Examples:
        >>> import numpy as np
        >>> ids = (Interval(low=0, high=4, whole=True),)
        >>> draw_samples(ids, (1, 3), lambda shape: np.full(shape, 0.5), np.zeros)
        array([[2., 2., 2.]])
    """
    import numpy as np

    rows = np.zeros((shape[0], math.prod(shape[1:])))
    counts = [interval.count for interval in input_range]
    low, high, whole = (
        np.resize(np.repeat(values, counts), rows.shape[1])
        for values in (
            [math.nan if interval.low is None else interval.low for interval in input_range],
            [math.nan if interval.high is None else interval.high for interval in input_range],
            [interval.whole for interval in input_range],
        )
    )
    drawn = uniform(rows.shape).astype(np.float64)
    integers = np.minimum(np.floor(low + drawn * (high - low + 1)), high)
    rows[:] = np.where(whole, integers, low + drawn * (high - low))
    free = np.isnan(low)
    if free.any():
        rows[:, free] = normal((shape[0], int(free.sum())))
    return rows.reshape(shape)


def fits(input_range: InputRange, numbers: int) -> bool:
    """Whether the intervals are valid for samples of this many numbers."""
    period = sum(interval.count for interval in input_range)
    return (
        0 < period <= max(numbers, 1)
        and numbers % period == 0
        and all(
            (i.low is None and i.high is None and not i.whole)
            or (i.low is not None and i.high is not None and i.low <= i.high)
            for i in input_range
        )
    )


def range_of(samples: "np.ndarray") -> InputRange:
    """The range of the numbers in at least two real `samples` (n, *sample shape).

    Each number of a sample has its own interval from the smallest to the largest value. In large
    samples, such as pictures, all positions along the longest axes share one interval.

    Examples:
        >>> import numpy as np
        >>> range_of(np.array([[0, 0.5], [4, 1.5]]))[0]
        Interval(low=0.0, high=4.0, whole=True, count=1)
    """
    import numpy as np

    low, high = samples.min(0).astype(np.float64), samples.max(0).astype(np.float64)
    whole = np.equal(np.trunc(samples), samples).all(0)
    for axis in np.argsort(low.shape)[::-1]:
        # Keep an axis along which ids and other numbers are next to each other.
        if low.size <= MOST_INTERVALS or (whole != whole.take([0], axis)).any():
            continue
        low, high = low.min(axis, keepdims=True), high.max(axis, keepdims=True)
        whole = whole.all(axis, keepdims=True)
    spread = np.where((low == high) & ~whole, SPREAD * np.abs(low), 0)
    low, high = low - spread, high + spread
    shape = samples.shape[1:]
    columns = [np.broadcast_to(values, shape).reshape(-1) for values in (low, high, whole)]
    return repeated(
        [
            Interval(low=float(a), high=float(b), whole=bool(c))
            for a, b, c in zip(*columns, strict=True)
        ]
    )


def repeated(intervals: Sequence[Interval]) -> InputRange:
    """Shorten `intervals`, one for each number: join equal neighbours and remove repetitions."""
    number = len(intervals)
    for period in range(1, number + 1):
        if number % period == 0 and intervals[period:] == intervals[:-period]:
            break
    runs: list[Interval] = []
    for interval in intervals[:period]:
        if runs and msgspec.structs.replace(runs[-1], count=1) == interval:
            runs[-1] = msgspec.structs.replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(interval)
    return tuple(runs)
