"""A coarse summary of a device's samples. It shows whether a sensor uses other units.

The summary reveals little more about the samples. If a model has batch norm, samples in other units
hardly change the loss. So nobody would notice the other units without the summary.
"""

from collections.abc import Callable

import numpy as np

from device_agent.formats.protocol.rounds import MOST_CHANNELS, InputSummary

LEAST_SAMPLES = 20
"""Quantiles of fewer samples would reveal single values."""
MOST_VALUES = 1 << 20
"""Quantiles are computed from at most this many values, of evenly spaced samples."""
QUANTILES = np.array([0.05, 0.5, 0.95])
DIGITS = 2
"""Significant digits of a quantile."""
SCALE = 8.0
"""Inputs are far off if their range is this many times wider or narrower."""
SHIFT = 5.0
"""Inputs are far off if their median differs by this many times the range."""


def summary_of(
    x: np.ndarray, rows: Callable[[np.ndarray], np.ndarray] | None = None
) -> InputSummary | None:
    """Summarise the samples `x` (n, channels, ...).

    If `x` is a memory-mapped file, the function `rows` copies samples by index. Returns None if the
    samples are integers, such as word ids, or fewer than `LEAST_SAMPLES`.

    Examples:
        >>> summary_of(np.arange(400, dtype=np.float32).reshape(200, 2)).channels
        ((20.0, 200.0, 380.0), (21.0, 200.0, 380.0))
    """
    if x.dtype != np.float32 or len(x) < LEAST_SAMPLES:
        return None
    values = x.size // len(x)
    count = min(len(x), max(LEAST_SAMPLES, MOST_VALUES // values))
    chosen = np.linspace(0, len(x) - 1, count).astype(int)
    some = x[chosen] if rows is None else rows(chosen)
    channels = x.shape[1] if x.ndim > 1 and x.shape[1] <= MOST_CHANNELS else 1
    values_of = some.reshape(count, channels, -1).swapaxes(0, 1).reshape(channels, -1)
    quantiles = np.quantile(values_of, QUANTILES, axis=1).T.tolist()
    return InputSummary(tuple((_rounded(a), _rounded(b), _rounded(c)) for a, b, c in quantiles))


def far_off(own: InputSummary, reference: InputSummary) -> str | None:
    """Describe the first channel of `own` that is far from `reference`; None if there is none."""
    if len(own.channels) != len(reference.channels):
        return None
    largest = max(max(abs(low), abs(high)) for low, _, high in reference.channels)
    for channel, (mine, other) in enumerate(zip(own.channels, reference.channels, strict=True)):
        width, usual = mine[2] - mine[0], other[2] - other[0]
        # If a channel is constant in the reference, compare it with the largest of all channels.
        shifted = abs(mine[1] - other[1]) > SHIFT * (usual or largest)
        wider = width > SCALE * (usual or largest)
        if largest > 0 and (shifted or wider or 0 < SCALE * width < usual):
            return f"channel {channel}: {_range(mine)}, instead of {_range(other)}"
    return None


def _range(quantiles: tuple[float, float, float]) -> str:
    return f"{quantiles[0]:g} to {quantiles[2]:g}"


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS - 1}e}")
