"""Rules that combine changes element by element. Krum and FLTrust first compare whole updates.

Changes are float arrays (n, m) of n updates and m elements. An element that an update does not
contain is NaN.
"""

import numpy as np

TRIMMED = 0.3
"""The share of the values that `trimmed_mean` leaves out on each side."""
DISAGREEING = 0.4
"""The largest share of the updates that `disagreeing` returns."""


def trimmed_mean(changes: np.ndarray, share: float = TRIMMED) -> np.ndarray:
    """The mean of each element without its lowest and highest values (Yin et al. 2018).

    Of h values, max(1, floor(share * h)) are dropped on each side, but one or two always remain. So
    two values give their mean, and `share` = 0.5 gives the median.

    Returns:
        (m,), float64; NaN for elements that no update contains.
    """
    ordered = np.sort(changes, axis=0)  # NaN comes last
    held = (~np.isnan(changes)).sum(0)
    cut = np.maximum(1, np.floor(share * held + 1e-9).astype(int))
    cut = np.minimum(cut, np.maximum(held - 1, 0) // 2)
    place = np.arange(len(changes))[:, None]
    inside = (place >= cut) & (place < held - cut)
    total = np.where(inside, ordered, 0.0).sum(0, dtype=np.float64)
    return np.where(held > 0, total / np.maximum(held - 2 * cut, 1), np.nan)


def mean(changes: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """The mean of each element over the updates that contain it, (m,), float64; NaN if none does.

    `weights` (n,) are positive. If None, all updates have the same weight.
    """
    own = np.ones(len(changes)) if weights is None else weights
    held = own @ ~np.isnan(changes)
    total = own @ np.nan_to_num(changes.astype(np.float64))
    return np.where(held > 0, total / np.where(held > 0, held, 1.0), np.nan)


class Pairs:
    """Compares the changes of every two of n updates, over the elements that both contain."""

    def __init__(self, updates: int) -> None:
        self._products = np.zeros((updates, updates))
        self._squares = np.zeros((updates, updates))
        self._common = np.zeros((updates, updates))

    def add(self, changes: np.ndarray, rows: np.ndarray) -> None:
        """Add elements. `rows` are the numbers of the updates in `changes`."""
        held = ~np.isnan(changes)
        values, mask = np.where(held, changes, 0.0).astype(np.float64), held.astype(np.float64)
        place = np.ix_(rows, rows)
        self._products[place] += values @ values.T
        self._squares[place] += values**2 @ mask.T
        self._common[place] += mask @ mask.T

    def distances(self) -> np.ndarray:
        """The mean squared differences (n, n); without a common element, the largest of all."""
        squares = self._squares + self._squares.T - 2 * self._products
        known = np.where(self._common > 0, squares, 0.0) / np.maximum(self._common, 1)
        return np.where(self._common > 0, np.maximum(known, 0.0), known.max())

    def cosines(self) -> np.ndarray:
        """The cosines of the changes (n, n); 0 without a common element."""
        norms = np.sqrt(self._squares) * np.sqrt(self._squares.T)
        return self._products / np.where(norms > 0, norms, 1.0)


class Alignment:
    """Compares the changes of n updates with a direction, over the elements that each contains."""

    def __init__(self, updates: int) -> None:
        self._products = np.zeros(updates)
        self._squares = np.zeros(updates)
        self._lengths = np.zeros(updates)

    def add(self, changes: np.ndarray, rows: np.ndarray, direction: np.ndarray) -> None:
        """Add m elements: `changes` (rows, m) of the updates `rows`, and their `direction` (m,)."""
        held = ~np.isnan(changes)
        values = np.where(held, changes, 0.0).astype(np.float64)
        self._products[rows] += values @ direction
        self._squares[rows] += np.square(values).sum(1)
        self._lengths[rows] += held @ np.square(direction)

    def trust(self) -> np.ndarray:
        """The cosine of each update's change with the direction, (n,); 0 if it is negative."""
        norms = np.sqrt(self._squares) * np.sqrt(self._lengths)
        return np.maximum(self._products, 0.0) / np.where(norms > 0, norms, 1.0)

    def scales(self) -> np.ndarray:
        """The factors that scale each change to the length of the direction times one number, (n,).

        The number is chosen so that the lower median of the updates' factors is 1.
        """
        known = (self._squares > 0) & (self._lengths > 0)
        sizes = np.sqrt(np.where(known, self._squares, 1.0) / np.where(known, self._lengths, 1.0))
        ordered = np.sort(sizes[known])
        middle = ordered[(len(ordered) - 1) // 2] if len(ordered) else 1.0
        return np.where(known, middle / sizes, 0.0)


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


def disagreeing(cosines: np.ndarray) -> list[int]:
    """The updates that point against most others, ascending; at most the share DISAGREEING of all.

    As long as an update has a mean cosine below 0 with the remaining updates, the update with the
    lowest mean cosine is removed.

    Args:
        cosines: The cosines between the changes of all updates, (n, n).

    Examples:
        >>> disagreeing(np.array([[1, 0.2, -0.5], [0.2, 1, -0.1], [-0.5, -0.1, 1]]))
        [2]
    """
    left, out = [*range(len(cosines))], list[int]()
    while len(out) < int(DISAGREEING * len(cosines)):
        sums = cosines[np.ix_(left, left)].sum(1) - cosines[left, left]
        if sums.min() >= 0:
            break
        out.append(left.pop(int(sums.argmin())))
    return sorted(out)
