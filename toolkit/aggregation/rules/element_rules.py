"""Rules that combine changes element by element, and Krum, which chooses among updates.

Changes are float arrays (n, m) of n updates and m elements. An element that an update does not hold
is NaN.
"""

import numpy as np

TRIMMED = 0.3
"""The share of the values that `trimmed_mean` leaves out on each side."""


def trimmed_mean(changes: np.ndarray, share: float = TRIMMED) -> np.ndarray:
    """The mean of each element without its lowest and highest values (Yin et al. 2018).

    Of h values, max(1, floor(share * h)) are dropped on each side, but one or two always remain. So
    two values give their mean, and `share` = 0.5 gives the median.

    Returns:
        (m,), float64; NaN for elements that no update holds.
    """
    ordered = np.sort(changes, axis=0)  # NaN comes last
    held = (~np.isnan(changes)).sum(0)
    cut = np.maximum(1, np.floor(share * held + 1e-9).astype(int))
    cut = np.minimum(cut, np.maximum(held - 1, 0) // 2)
    place = np.arange(len(changes))[:, None]
    inside = (place >= cut) & (place < held - cut)
    total = np.where(inside, ordered, 0.0).sum(0, dtype=np.float64)
    return np.where(held > 0, total / np.maximum(held - 2 * cut, 1), np.nan)


def mean(changes: np.ndarray) -> np.ndarray:
    """The mean of each element over the updates that hold it, (m,), float64; NaN if none does."""
    held = (~np.isnan(changes)).sum(0)
    total = np.nansum(changes, axis=0, dtype=np.float64)
    return np.where(held > 0, total / np.maximum(held, 1), np.nan)


class Distances:
    """The mean squared difference of every two of n updates, over the elements that both hold."""

    def __init__(self, updates: int) -> None:
        self._squares = np.zeros((updates, updates))
        self._common = np.zeros((updates, updates))

    def add(self, changes: np.ndarray, rows: np.ndarray) -> None:
        """Add elements. `rows` are the numbers of the updates in `changes`."""
        held = ~np.isnan(changes)
        values, mask = np.where(held, changes, 0.0).astype(np.float64), held.astype(np.float64)
        squares = values**2 @ mask.T
        place = np.ix_(rows, rows)
        self._squares[place] += squares + squares.T - 2 * values @ values.T
        self._common[place] += mask @ mask.T

    def result(self) -> np.ndarray:
        """The distances (n, n). Two updates without a common element get the largest distance."""
        known = np.where(self._common > 0, self._squares, 0.0) / np.maximum(self._common, 1)
        return np.where(self._common > 0, np.maximum(known, 0.0), known.max())


def krum_choice(distances: np.ndarray) -> list[int]:
    """The updates that multi-Krum keeps (Blanchard et al. 2017), ascending.

    The score of an update is the sum of its distances to its n - f - 2 nearest updates. The n - f
    updates with the lowest scores are kept, where f = (n - 3) // 2 is the largest number of
    hostile updates that Krum tolerates. If there are fewer than five updates, all are kept.

    Args:
        distances: The squared distances between all updates, (n, n).
    """
    n = len(distances)
    hostile = max(0, (n - 3) // 2)
    if not hostile:
        return list(range(n))
    others = np.sort(distances + np.diag(np.full(n, np.inf)), axis=1)
    scores = others[:, : n - hostile - 2].sum(1)
    return sorted(np.argsort(scores, kind="stable")[: n - hostile].tolist())
