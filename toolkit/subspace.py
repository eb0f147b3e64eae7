"""Leading singular vectors by block subspace iteration, to a stated error.

Halko, Martinsson, Tropp: Finding structure with randomness, 2011, algorithm 4.4, with a test for
when to stop. Nearly all work is float32 matrix products; a full SVD spends most of its time on
singular values that a truncation drops.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 0.01
"""Frobenius error allowed beyond the best truncation's, relative to it."""

OVERSAMPLING = 0.25
"""Columns of the block beyond the rank, relative to it: the last wanted vectors converge faster."""

FEWEST_STEPS = 4
"""Half-steps before convergence is judged: the first gain, from any old basis, says little."""

MOST_STEPS = 40
"""Half-steps after which the iteration gives up."""

RESOLUTION = 1e-7
"""Singular values below this share of the largest are float32 rounding."""

DEPENDENT = 1e-5
"""Share of the largest pivot below which Cholesky-QR loses orthogonality."""


class Leading(NamedTuple):
    """The leading components of a matrix (m, n), best first, and where to go on from.

    `u` (m, rank), `v` (n, rank): orthogonal columns, whose norms are the roots of the singular
    values. `basis` (n, rank and oversampling): orthonormal.
    """

    u: Tensor
    v: Tensor
    basis: Tensor


def sketch(columns: int, rank: int) -> Tensor:
    """A random orthonormal block (columns, width) to start from; always the same one."""
    width = min(columns, rank + max(8, round(OVERSAMPLING * rank)))
    generator = torch.Generator().manual_seed(0)
    basis: Tensor = torch.linalg.qr(torch.randn(columns, width, generator=generator)).Q
    return basis


def leading(matrix: Tensor, rank: int, basis: Tensor) -> Leading | None:
    """The `rank` leading components of `matrix` (m, n), from an orthonormal `basis` (n, width).

    Half-steps Q <- orth(A P) and P <- orth(A^T Q) in turn. ||A P||^2 is the energy that a basis
    captures; by row, the eigenvalues of (A P)^T A P are the squared singular values it knows of.
    None where MOST_STEPS do not get every truncation up to `rank` within the tolerance.
    """
    total = float(matrix.double().square().sum())
    ahead, back = matrix, matrix.T
    energies: list[Tensor] = []
    for _ in range(MOST_STEPS):
        image = ahead @ basis
        gram = gram_matrix(image)
        energies.append(torch.linalg.eigvalsh(gram).flip(0)[:rank].cumsum(0))
        if converged(energies, total):
            sides = balanced(image, basis, gram)
            if ahead is matrix:
                return Leading(sides[0][:, :rank], sides[1][:, :rank], basis)
            return Leading(sides[1][:, :rank], sides[0][:, :rank], orthonormal(image, gram))
        basis = orthonormal(image, gram)
        ahead, back = back, ahead
    return None


def converged(energies: Sequence[Tensor], total: float) -> bool:
    """Whether no truncation has more left to win than the tolerance, by two estimates.

    `energies`: what each half-step captured, (rank,) for truncations to rank 1, 2, ...; `total`:
    the matrix's. Without a gap in the spectrum the error falls as 1 / steps: the last gain times
    the steps is left. On two plateaus close to each other gains hardly change at first: by their
    ratio q, the last gain times q / (1 - q) is left.
    """
    if len(energies) < FEWEST_STEPS:
        return False
    first, second, third = energies[-3:]
    earlier, gain, tail = second - first, third - second, total - third
    noise = 1e-9 * total
    # Energies are squared errors, hence twice the tolerance.
    allowed = 2 * TOLERANCE * tail + noise
    slow = (len(energies) - 1) * gain <= allowed
    steady = (gain.square() <= allowed * (earlier - gain)) | (gain <= 1e-4 * tail + noise)
    return bool((slow & steady).all())


def gram_matrix(block: Tensor) -> Tensor:
    """block^T block (k, k) in float64: squaring in float32 would lose the small directions."""
    wide = block.double()
    return wide.T @ wide


def orthonormal(block: Tensor, gram: Tensor) -> Tensor:
    """An orthonormal basis (m, k) of the columns of `block`, whose Gram matrix is `gram`.

    Cholesky-QR, many times faster than Householder's, which is kept for dependent columns.
    """
    factor, failed = torch.linalg.cholesky_ex(gram)
    pivots = factor.diagonal()
    basis: Tensor
    if failed or float(pivots.min()) < DEPENDENT * float(pivots.max()):
        basis = torch.linalg.qr(block).Q
    else:
        basis = torch.linalg.solve_triangular(factor, block.double().T, upper=False).T.float()
    return basis


def balanced(image: Tensor, basis: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of image basis^T, best component first, each the root of the singular values.

    With gram = image^T image = W S^2 W^T: image W S^(-1/2) and basis W S^(1/2).
    """
    energies, rotation = torch.linalg.eigh(gram)
    values = energies.flip(0).clamp_min(0).sqrt()
    rotation = rotation.flip(1)
    real = values > RESOLUTION * values[0]
    root = torch.where(real, values, 1).sqrt()
    return (
        (image.double() @ (rotation / root * real)).float(),
        (basis.double() @ (rotation * root * real)).float(),
    )
