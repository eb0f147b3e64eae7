"""Leading singular vectors by block subspace iteration, to a stated error.

Halko, Martinsson, Tropp: Finding structure with randomness, 2011, algorithm 4.4, with a test for
when to stop. A cold start takes a sparse sketch (Clarkson, Woodruff: Low rank approximation and
regression in input sparsity time, 2013) and a shifted step (Feng, Yu, Xie, Tang: Algorithm 1043,
Faster randomized SVD with dynamic shifts, 2024). Nearly all work is float32 matrix products; a
full SVD spends most of its time on singular values that a truncation drops.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 0.015
"""Frobenius error allowed beyond the best truncation's, relative to it, by the estimates here."""

OVERSAMPLING = 3 / 16
"""Columns of the block beyond the rank, relative to it: the last wanted vectors converge faster."""

SHIFT = 0.7
"""Shift of a leap, as a share of the least squared singular value known.

Up to a half no leap is worse than two half-steps. Beyond, directions of nearly no energy grow;
the half-steps that follow remove them.
"""

SKETCH_STEPS = 3
"""Half-steps that the sketch is worth: its two products, and its sums in place of one."""

LEAP_STEPS = 4
"""Half-steps that a leap, of two products, is worth at a shift of half the squared values."""

MOST_STEPS = 40
"""Half-steps after which the iteration gives up."""

RESOLUTION = 1e-7
"""Singular values below this share of the largest are float32 rounding."""

DEPENDENT = 1e-5
"""Share of the largest pivot below which Cholesky-QR loses orthogonality."""

INDEPENDENT = 1e-2
"""Share of the largest pivot above which solving in float32 keeps it."""

RESOLVED = 0.1
"""Share of the largest pivot above which a float32 Gram matrix keeps it as well."""


class Leading(NamedTuple):
    """The leading components of a matrix (m, n), best first, and where to go on from.

    `u` (m, rank), `v` (n, rank): orthogonal columns, whose norms are the roots of the singular
    values. `basis` (n, rank and oversampling): orthonormal.
    """

    u: Tensor
    v: Tensor
    basis: Tensor


class Captured(NamedTuple):
    """Squared singular values (rank,) that a basis knows of, best first, and the step from it.

    `shift`: the a of a leap; None before a half-step.
    """

    values: Tensor
    shift: float | None


def sketch(matrix: Tensor, rank: int) -> Tensor:
    """An orthonormal block (n, width) to start on `matrix` (m, n) from; always the same one.

    orth(A^T A S), where S sums the rows of A with random signs, each row in one sum. That is one
    pass over the matrix, and as good as a half-step from a random block.
    """
    rows, columns = matrix.shape
    width = min(rows, columns, rank + max(8, round(OVERSAMPLING * rank)))
    generator = torch.Generator().manual_seed(0)
    place = torch.randperm(rows, generator=generator) % width
    sign = 1 - 2 * torch.randint(2, (rows, 1), generator=generator)
    sums = torch.zeros(width, columns).index_add_(0, place, sign * matrix)
    return spanned(matrix.T @ (matrix @ sums.T))


def leading(matrix: Tensor, rank: int, basis: Tensor | None = None) -> Leading | None:
    """The `rank` leading components of `matrix` (m, n), from an orthonormal `basis` (n, width).

    Half-steps Q <- orth(A P) and P <- orth(A^T Q) in turn. ||A P||^2 is the energy that a basis
    captures; by row, the eigenvalues of (A P)^T A P are the squared singular values it knows of.
    Without a basis, a leap comes first: P <- orth(A^T A P - a P), a in proportion to the least of
    them. None where MOST_STEPS do not get every truncation up to `rank` within the tolerance.
    """
    total = float(torch.linalg.vector_norm(matrix, dim=1).double().square().sum())
    ahead, back = matrix, matrix.T
    may_leap = basis is None
    steps = 0 if basis is not None else SKETCH_STEPS
    basis = sketch(matrix, rank) if basis is None else basis
    history: list[Captured] = []
    dtype = torch.float32
    for _ in range(MOST_STEPS):
        image = ahead @ basis
        gram = gram_matrix(image, dtype)
        values, rotation = spectrum(gram, len(history) > 1)
        if dtype == torch.float32 and not suits_float32(values, total):
            dtype = torch.float64
            gram = gram_matrix(image)
            values, rotation = spectrum(gram, len(history) > 1)
        shift = SHIFT * float(values[0]) if may_leap and dtype == torch.float32 else None
        # The first gain, from any old basis, says little.
        if steps > 0:
            history.append(Captured(values.double().flip(0)[:rank], shift))
        if len(history) > 2 and converged(steps, history, total):
            near, far = balanced(image, basis, values[-rank:], rotation[:, -rank:])
            if ahead is matrix:
                return Leading(near, far, basis)
            return Leading(far, near, orthonormal(image, gram))
        if shift is None:
            basis = orthonormal(image, gram)
            ahead, back = back, ahead
            steps += 1
        else:
            basis = spanned(torch.addmm(basis, back, image, beta=-shift))
            steps += LEAP_STEPS
        may_leap = False
    return None


def converged(steps: int, history: Sequence[Captured], total: float) -> bool:
    """Whether no truncation has more left to win than the tolerance, by two estimates.

    `steps`: half-steps done, or work worth as many; `history`: what the bases captured; `total`:
    the matrix's energy. Without a gap in the spectrum the error falls as a power of the steps, of
    random matrices as their square or faster: half the last gain times the steps is left. On two
    plateaus close to each other gains hardly change at first: by the ratio q of their squared
    singular values, the last gain times q / (1 - q) is left. q is seen in the gain before: a
    half-step shrinks the error by q, a leap by ((q - s) / (1 - s))^2, s the shift as a share of
    the upper plateau.
    """
    first, second, third = (captured.values.cumsum(0) for captured in history[-3:])
    earlier, gain, tail = second - first, third - second, total - third
    noise = 1e-9 * total
    # Energies are squared errors, hence twice the tolerance.
    allowed = 2 * TOLERANCE * tail + noise
    slow = steps / 2 * gain <= allowed
    # The greatest q that leaves no more than is allowed must shrink the error as much as was seen.
    greatest = allowed / (allowed + gain.clamp_min(0))
    shrunk = greatest
    shift = history[-3].shift
    if shift is not None:
        share = shift / history[-1].values
        shrunk = ((greatest - share).clamp_min(0) / (1 - share)).square()
    steady = gain * (1 - shrunk) <= earlier * shrunk * (1 - greatest)
    return bool((slow & (steady | (gain <= 1e-4 * tail + noise))).all())


def gram_matrix(block: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """block^T block (k, k): squaring in float32 would lose the small directions, where any are."""
    block = block.to(dtype)
    return block.T @ block


def suits_float32(values: Tensor, total: float) -> bool:
    """Whether float32 resolves the Gram matrix of these eigenvalues (k,), and the energy beyond.

    It does for flat spectra, the slowest to converge, and for moderately decaying ones.
    """
    return bool(values[0] > 1e-3 * values[-1] and total - values.sum() > 0.01 * total)


def spectrum(gram: Tensor, vectors: bool) -> tuple[Tensor, Tensor]:
    """Eigenvalues (k,) of `gram`, ascending, and its eigenvectors (k, k); none unless `vectors`."""
    if vectors:
        values, rotation = torch.linalg.eigh(gram)
        return values, rotation
    return torch.linalg.eigvalsh(gram), gram[:, :0]


def spanned(block: Tensor) -> Tensor:
    """An orthonormal basis (m, k) of the columns of `block`."""
    gram = gram_matrix(block, torch.float32)
    pivots = torch.linalg.cholesky_ex(gram).L.diagonal()
    # Not so of the NaN that a failed factorization may hold.
    if not float(pivots.min()) > RESOLVED * float(pivots.max()):
        gram = gram_matrix(block)
    return orthonormal(block, gram)


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


def balanced(
    image: Tensor, basis: Tensor, energies: Tensor, rotation: Tensor
) -> tuple[Tensor, Tensor]:
    """Factors of image basis^T, best component first, each the root of the singular values.

    With image^T image = W S^2 W^T: image W S^(-1/2) and basis W S^(1/2). `energies` (rank,) and
    `rotation` (width, rank): the largest of S^2, ascending, and their columns of W.
    """
    values = energies.flip(0).clamp_min(0).sqrt()
    rotation = rotation.flip(1)
    real = values > RESOLUTION * values[0]
    root = torch.where(real, values, 1).sqrt()
    return (
        (image.to(rotation.dtype) @ (rotation / root * real)).float(),
        (basis.to(rotation.dtype) @ (rotation * root * real)).float(),
    )
