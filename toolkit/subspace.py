"""Leading singular vectors by block subspace iteration, to a stated error.

Halko, Martinsson, Tropp: Finding structure with randomness, 2011, algorithm 4.4, with a test for
when to stop. Nearly all work is float32 matrix products; a full SVD spends most of its time on
singular values that a truncation drops.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 0.015
"""Frobenius error allowed beyond the best truncation's, relative to it, by the estimates here."""

OVERSAMPLING = 0.25
"""Columns of the block beyond the rank, relative to it: the last wanted vectors converge faster."""

MOST_STEPS = 40
"""Half-steps after which the iteration gives up."""

RESOLUTION = 1e-7
"""Singular values below this share of the largest are float32 rounding."""

DEPENDENT = 1e-5
"""Share of the largest pivot below which Cholesky-QR loses orthogonality."""

INDEPENDENT = 1e-2
"""Share of the largest pivot above which solving in float32 keeps it."""


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
    block = torch.randn(columns, width, generator=generator)
    return orthonormal(block, gram_matrix(block))


def leading(matrix: Tensor, rank: int, basis: Tensor) -> Leading | None:
    """The `rank` leading components of `matrix` (m, n), from an orthonormal `basis` (n, width).

    Half-steps Q <- orth(A P) and P <- orth(A^T Q) in turn. ||A P||^2 is the energy that a basis
    captures; by row, the eigenvalues of (A P)^T A P are the squared singular values it knows of.
    None where MOST_STEPS do not get every truncation up to `rank` within the tolerance.
    """
    total = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
    ahead, back = matrix, matrix.T
    energies: list[Tensor] = []
    dtype = torch.float32
    for step in range(MOST_STEPS):
        image = ahead @ basis
        gram = gram_matrix(image, dtype)
        values = torch.linalg.eigvalsh(gram)
        if dtype == torch.float32 and not suits_float32(values, total):
            dtype = torch.float64
            gram = gram_matrix(image)
            values = torch.linalg.eigvalsh(gram)
        energies.append(values.double().flip(0)[:rank].cumsum(0))
        # The first gain, from any old basis, says little.
        if step > 2 and converged(step, energies, total):
            gram = gram_matrix(image)
            near, far = balanced(image, basis, gram, rank)
            if ahead is matrix:
                return Leading(near, far, basis)
            return Leading(far, near, orthonormal(image, gram))
        basis = orthonormal(image, gram)
        ahead, back = back, ahead
    return None


def converged(step: int, energies: Sequence[Tensor], total: float) -> bool:
    """Whether no truncation has more left to win than the tolerance, by two estimates.

    `energies`: what each half-step captured, (rank,) for truncations to rank 1, 2, ...; `total`:
    the matrix's. Without a gap in the spectrum the error falls as a power of the steps, of random
    matrices as their square or faster: half the last gain times the steps is left. On two
    plateaus close to each other gains hardly change at first: by their ratio q, the last gain
    times q / (1 - q) is left.
    """
    first, second, third = energies[-3:]
    earlier, gain, tail = second - first, third - second, total - third
    noise = 1e-9 * total
    # Energies are squared errors, hence twice the tolerance.
    allowed = 2 * TOLERANCE * tail + noise
    slow = step / 2 * gain <= allowed
    steady = (gain.square() <= allowed * (earlier - gain)) | (gain <= 1e-4 * tail + noise)
    return bool((slow & steady).all())


def gram_matrix(block: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """block^T block (k, k): squaring in float32 would lose the small directions, where any are."""
    block = block.to(dtype)
    return block.T @ block


def suits_float32(values: Tensor, total: float) -> bool:
    """Whether float32 resolves the Gram matrix of these eigenvalues (k,), and the energy beyond.

    A flat spectrum, the slowest to converge, is the one where it does.
    """
    return bool(values[0] > 0.01 * values[-1] and total - values.sum() > 0.01 * total)


def orthonormal(block: Tensor, gram: Tensor) -> Tensor:
    """An orthonormal basis (m, k) of the columns of `block`, whose Gram matrix is `gram`.

    Cholesky-QR, many times faster than Householder's, which is kept for dependent columns.
    """
    factor, failed = torch.linalg.cholesky_ex(gram)
    pivots = factor.diagonal()
    share = 0.0 if failed else float(pivots.min() / pivots.max())
    basis: Tensor
    if share < DEPENDENT:
        basis = torch.linalg.qr(block).Q
    else:
        dtype = torch.float32 if share > INDEPENDENT else torch.float64
        rows = block.to(dtype).T
        basis = torch.linalg.solve_triangular(factor.to(dtype), rows, upper=False).T.float()
    return basis


def balanced(image: Tensor, basis: Tensor, gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of image basis^T, its `rank` best components, each the root of the singular values.

    With gram = image^T image = W S^2 W^T: image W S^(-1/2) and basis W S^(1/2).
    """
    energies, rotation = torch.linalg.eigh(gram)
    values = energies.flip(0)[:rank].clamp_min(0).sqrt()
    rotation = rotation.flip(1)[:, :rank]
    real = values > RESOLUTION * values[0]
    root = torch.where(real, values, 1).sqrt()
    return (
        (image.double() @ (rotation / root * real)).float(),
        (basis.double() @ (rotation * root * real)).float(),
    )
