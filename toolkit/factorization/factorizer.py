"""The server's factorizations: one for each layer serves every rank, device and round.

A decomposition to a rank holds those to all smaller ranks, so `Factorizer` computes to the next
rung of a fixed ladder and answers with the first columns. The ladder depends on the matrix alone:
factors do not depend on which ranks were asked for, in which order, or on the rest of the fleet.

In the next round the iteration starts from the last round's subspace. Factors therefore depend on
the weights asked about since the factorizer was made, always in the same way; a server that starts
again starts cold, and its factors are as good but not the same bytes.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.factorization.decompose_weights import truncated_svd
from toolkit.factorization.subspace_iteration import leading

RUNGS = (1 / 6, 1 / 3)
"""Ranks computed, as shares of the columns: FedHM's ratios 1/2 and 1 of a 3 x 3 convolution."""

FEWEST = 256
"""Rows or columns below which the exact SVD is as fast."""

GREATEST = 1 / 3
"""Rank, as a share of the shorter side, above which the exact SVD is as fast."""

NEAR = 0.1
"""Change of the weights, relative to their norm, up to which the last subspace is a good start.

Best errors and a subspace's error both move by at most the norm of the change.
"""


class Known(NamedTuple):
    """Factors `u` (m, width), `v` (n, width) of `matrix`; the `basis` that gave them, if any."""

    matrix: Tensor
    u: Tensor
    v: Tensor
    basis: Tensor | None


@dataclass
class Factorizer:
    """Truncated factors of named matrices, remembered until the matrix changes.

    Every truncation has at most `TOLERANCE` (subspace_iteration.py) more Frobenius error than the
    best one, by the iteration's own estimate; with `exact` it is the best one, for a full SVD.
    """

    exact: bool = False
    _last: dict[tuple[str, int], Known] = field(default_factory=dict, repr=False)

    def truncated(self, name: str, matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """U (m, rank) and V (n, rank), as `truncated_svd`, of `matrix` (m, n) called `name`.

        Signs, and the vectors of nearly equal singular values, may differ from the SVD's.
        """
        matrix = matrix.detach().float()
        width = min(matrix.shape) if self.exact else rung(matrix, rank)
        known = self._last.get((name, width))
        if known is None or not torch.equal(known.matrix, matrix):
            known = self._last[name, width] = decompose(matrix.clone(), width, known)
        return known.u[:, :rank], known.v[:, :rank]


def rung(matrix: Tensor, rank: int) -> int:
    """The rank to compute for factors of `rank`; the full one where that takes the exact SVD."""
    rows, columns = matrix.shape
    widths = (round(share * columns) for share in RUNGS)
    full = min(rows, columns)
    width = next((width for width in widths if width >= rank), full)
    return full if full < FEWEST or width > GREATEST * full else width


def decompose(matrix: Tensor, width: int, last: Known | None) -> Known:
    """The `width` leading components of `matrix`, from the `last` matrix's where it is near."""
    if width < min(matrix.shape):
        warm = last.basis if last and near(matrix, last.matrix) else None
        found = leading(matrix, width, warm)
        if found:
            return Known(matrix, *found)
    return Known(matrix, *truncated_svd(matrix, width), None)


def near(matrix: Tensor, last: Tensor) -> bool:
    """Whether `matrix` is `last`, changed a little."""
    return matrix.shape == last.shape and bool((matrix - last).norm() <= NEAR * last.norm())
