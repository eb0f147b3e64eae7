"""Factorizes weights on the server: one factorization of a layer serves several ranks.

A decomposition to some rank contains the decompositions to all smaller ranks. `Factorizer`
therefore chooses the smallest of a few fixed ranks that is large enough, and returns the first
columns. The fixed ranks depend only on the matrix. So factors do not depend on the requested ranks,
their order, or the rest of the fleet.

In the next round the iteration starts from the subspace of the last round. Factors therefore depend
on the weights that were factorized before, but always in the same way. After a restart, a server
has no subspace to start from. Its factors are equally good, but their bytes differ.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.factorization.subspace_iteration import leading_components
from toolkit.factorization.truncated_svd import truncated_svd

RANK_SHARES = (1 / 6, 1 / 3)
"""The ranks that are computed, as shares of the columns.

They are FedHM's rank ratios 1/2 and 1 of a 3 x 3 convolution.
"""

LEAST_SIDE = 256
"""If a matrix has fewer rows or columns, the exact SVD is as fast as the iteration."""

LARGEST_SHARE = 1 / 3
"""If the rank exceeds this share of the shorter side, the exact SVD is as fast."""

SMALL_CHANGE = 0.1
"""Up to this change of the weights, relative to their norm, the last subspace is a good start.

The best possible error and the error of a subspace both change by at most the norm of the change.
"""


class Known(NamedTuple):
    """Factors `u` (m, width) and `v` (n, width) of `matrix`; `basis` is None after an exact SVD."""

    matrix: Tensor
    u: Tensor
    v: Tensor
    basis: Tensor | None


@dataclass
class Factorizer:
    """Computes truncated factors of named matrices and caches them until the matrix changes.

    The Frobenius error of a truncation exceeds the best possible error by at most `TOLERANCE`
    (subspace_iteration.py), as estimated by the iteration.

    Attributes:
        exact: Whether to compute the best truncation, by a full SVD.
    """

    exact: bool = False
    _last: dict[tuple[str, int], Known] = field(default_factory=dict, repr=False)

    def truncated(self, name: str, matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return factors like `truncated_svd`, except for signs and nearly equal singular values.

        Args:
            name: Name under which the factors are cached.
            matrix: The matrix (m, n).
            rank: The rank r.

        Returns:
            U (m, r) and V (n, r).
        """
        matrix = matrix.detach().float()
        width = min(matrix.shape) if self.exact else width_for(matrix, rank)
        known = self._last.get((name, width))
        if known is None or not torch.equal(known.matrix, matrix):
            # A copy, because the caller may change the weights in place.
            known = self._last[name, width] = decompose(matrix.clone(), width, known)
        return known.u[:, :rank], known.v[:, :rank]


def width_for(matrix: Tensor, rank: int) -> int:
    """The rank to compute if factors of `rank` are requested; the full rank for an exact SVD."""
    rows, columns = matrix.shape
    widths = (round(share * columns) for share in RANK_SHARES)
    full = min(rows, columns)
    width = next((width for width in widths if width >= rank), full)
    # If the iteration would not be faster, one exact SVD serves all ranks.
    return full if full < LEAST_SIDE or width > LARGEST_SHARE * full else width


def decompose(matrix: Tensor, width: int, last: Known | None) -> Known:
    """The `width` leading components of `matrix`, starting from `last` if `last` is similar."""
    if width < min(matrix.shape):
        warm = last.basis if last and has_changed_little(matrix, last.matrix) else None
        leading = leading_components(matrix, width, warm)
        if leading:
            return Known(matrix, *leading)
    return Known(matrix, *truncated_svd(matrix, width), None)


def has_changed_little(matrix: Tensor, last: Tensor) -> bool:
    """Whether `matrix` differs from `last` only by a small change."""
    return matrix.shape == last.shape and bool((matrix - last).norm() <= SMALL_CHANGE * last.norm())
