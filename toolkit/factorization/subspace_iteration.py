"""Computes leading singular vectors by block subspace iteration, within a tolerance.

Halko, Martinsson, Tropp: Finding structure with randomness, 2011, algorithm 4.4, with a criterion
for stopping. Without a basis to start from, the iteration uses a sparse sketch (Clarkson, Woodruff:
Low rank approximation and regression in input sparsity time, 2013) and a shifted step (Feng, Yu,
Xie, Tang: Algorithm 1043, Faster randomized SVD with dynamic shifts, 2024). Nearly all work is
float32 matrix products. A full SVD spends most of its time on singular values that a truncation
drops.

A *half-step* multiplies by the matrix or its transpose. A *leap* is the shifted step, which
multiplies by both.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 0.015
"""The estimated Frobenius error may exceed the error of the best truncation by this share."""

OVERSAMPLING = 3 / 16
"""Additional columns of the block, relative to the rank. They speed up the last vectors."""

SHIFT = 0.7
"""Shift of a leap, relative to the smallest squared singular value known.

Up to 1/2, a leap is at least as good as two half-steps. Above 1/2, directions with nearly no energy
grow, and the following half-steps remove them again.
"""

SKETCH_STEPS = 3
"""Number of half-steps that the sketch counts as: two for its products, one for its sums."""

LEAP_STEPS = 4
"""Number of half-steps that a leap (two products) counts as, if the shift is 1/2."""

MOST_STEPS = 40
"""The iteration gives up after this many half-steps."""

RESOLUTION = 1e-7
"""Singular values below this share of the largest are float32 rounding errors."""

DEPENDENT = 1e-5
"""If a pivot is below this share of the largest pivot, Cholesky-QR loses orthogonality."""

INDEPENDENT = 3e-2
"""If all pivots are above this share of the largest, solving in float32 keeps orthogonality."""

RESOLVED = 0.4
"""If all pivots are above this share of the largest, a float32 Gram matrix keeps orthogonality."""


class Leading(NamedTuple):
    """The leading components of a matrix (m, n), largest first.

    Attributes:
        u: (m, rank), orthogonal columns whose norms are the roots of the singular values.
        v: (n, rank), scaled like `u`.
        basis: (n, rank + oversampling), orthonormal; the next iteration can start from it.
    """

    u: Tensor
    v: Tensor
    basis: Tensor


class StepRecord(NamedTuple):
    """The part of the matrix that one basis captures, and the step that followed.

    Attributes:
        values: Squared singular values (rank,) within the basis, largest first.
        shift: The shift a, if a leap followed; None for a half-step.
    """

    values: Tensor
    shift: float | None


def sketch(matrix: Tensor, rank: int) -> Tensor:
    """An orthonormal block (n, width) to start from. Equal matrices (m, n) give equal blocks.

    The block is orth(A^T A S). S adds up the rows of A with random signs, each row in one of the
    sums. This takes one pass over the matrix and is as good as a half-step from a random block.
    """
    rows, columns = matrix.shape
    width = min(rows, columns, rank + max(8, round(OVERSAMPLING * rank)))
    # A fixed seed, so that equal weights give equal factors.
    generator = torch.Generator().manual_seed(0)
    target = torch.randperm(rows, generator=generator) % width
    sign = 1 - 2 * torch.randint(2, (rows, 1), generator=generator)
    sums = torch.zeros(width, columns).index_add_(0, target, sign * matrix)
    return orthonormal_basis(matrix.T @ (matrix @ sums.T))


def leading_components(matrix: Tensor, rank: int, basis: Tensor | None = None) -> Leading | None:
    """Compute the leading components of a matrix by subspace iteration.

    Half-steps Q <- orth(A P) and P <- orth(A^T Q) alternate. ||A P||^2 is the energy that the basis
    P captures. The eigenvalues of (A P)^T A P are the squared singular values within the basis.
    Without a basis, a leap P <- orth(A^T A P - a P) comes first, with a in proportion to the
    smallest of these eigenvalues.

    Args:
        matrix: The matrix A (m, n).
        rank: How many components to compute.
        basis: An orthonormal basis (n, width) to start from.

    Returns:
        The components, or None if MOST_STEPS do not bring every truncation up to `rank` within the
        tolerance.
    """
    total = float(torch.linalg.vector_norm(matrix, dim=1).double().square().sum())
    ahead, back = matrix, matrix.T
    may_leap = basis is None
    steps = 0 if basis is not None else SKETCH_STEPS
    basis = sketch(matrix, rank) if basis is None else basis
    history: list[StepRecord] = []
    dtype = torch.float32
    for _ in range(MOST_STEPS):
        image = ahead @ basis
        gram = gram_matrix(image, dtype)
        values, rotation = spectrum(gram, len(history) > 1)
        # Repeat the step in float64 if the spectrum turns out to decay too fast.
        if dtype == torch.float32 and not suits_float32(values, total):
            dtype = torch.float64
            gram = gram_matrix(image)
            values, rotation = spectrum(gram, len(history) > 1)
        shift = SHIFT * float(values[0]) if may_leap and dtype == torch.float32 else None
        # The gain of the first step from a given basis says little about the convergence.
        if steps > 0:
            history.append(StepRecord(values.double().flip(0)[:rank], shift))
        if len(history) > 2 and converged(steps, history, total):
            near, far = balanced_factors(image, basis, values[-rank:], rotation[:, -rank:])
            # The loop alternates between the matrix and its transpose, so that the sides may be
            # swapped.
            if ahead is matrix:
                return Leading(near, far, basis)
            return Leading(far, near, orthonormalize(image, gram))
        if shift is None:
            basis = orthonormalize(image, gram)
            ahead, back = back, ahead
            steps += 1
        else:
            basis = orthonormal_basis(torch.addmm(basis, back, image, beta=-shift))
            steps += LEAP_STEPS
        may_leap = False
    return None


def converged(steps: int, history: Sequence[StepRecord], total: float) -> bool:
    """Whether every truncation is within the tolerance of the best truncation, by two estimates.

    The gain of a step is the energy that its basis captures, minus the energy that the previous
    basis captures.

    Without a gap in the spectrum, the error is an inverse power of the number of steps; for random
    matrices the power is 2 or higher. The last gain times half the number of steps then estimates
    the remaining gain.

    If the spectrum has two plateaus close to each other, gains hardly change at first. Let q be the
    ratio of the squared singular values of the plateaus. Then the remaining gain is the last gain
    times q / (1 - q). The gain before the last one shows q. A half-step shrinks the error by q, and
    a leap by ((q - s) / (1 - s))^2. s is the shift as a share of the upper plateau.

    Args:
        steps: Half-steps done, or equivalent work.
        history: The records of all steps; the last three count.
        total: Energy of the matrix.
    """
    first, second, third = (captured.values.cumsum(0) for captured in history[-3:])
    earlier, gain, tail = second - first, third - second, total - third
    noise = 1e-9 * total
    # Energies are squared errors, so that twice the tolerance is allowed.
    allowed = 2 * TOLERANCE * tail + noise
    slow = steps / 2 * gain <= allowed
    # The largest q whose remaining gain is allowed must explain the gain that was measured.
    largest = allowed / (allowed + gain.clamp_min(0))
    shrunk = largest
    shift = history[-3].shift
    if shift is not None:
        share = shift / history[-1].values
        shrunk = ((largest - share).clamp_min(0) / (1 - share)).square()
    steady = gain * (1 - shrunk) <= earlier * shrunk * (1 - largest)
    return bool((slow & (steady | (gain <= 1e-4 * tail + noise))).all())


def gram_matrix(block: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The Gram matrix block^T block (k, k).

    The default is float64, because squaring in float32 could lose directions of little energy.
    """
    block = block.to(dtype)
    return block.T @ block


def suits_float32(values: Tensor, total: float) -> bool:
    """Whether float32 is precise enough for a Gram matrix with the eigenvalues `values` (k,).

    It is precise enough for flat spectra, which converge slowest, and for moderate decay. `total`
    is the energy of the whole matrix.
    """
    return bool(values[0] > 1e-3 * values[-1] and total - values.sum() > 0.01 * total)


def spectrum(gram: Tensor, vectors: bool) -> tuple[Tensor, Tensor]:
    """Eigenvalues (k,) of `gram`, ascending, and its eigenvectors (k, k) if `vectors`."""
    if vectors:
        values, rotation = torch.linalg.eigh(gram)
        return values, rotation
    return torch.linalg.eigvalsh(gram), gram[:, :0]


def orthonormal_basis(block: Tensor) -> Tensor:
    """An orthonormal basis (m, k) of the columns of `block`."""
    gram = gram_matrix(block, torch.float32)
    pivots = torch.linalg.cholesky_ex(gram).L.diagonal()
    # Written with `not`, so that a NaN of a failed factorization also counts as dependent.
    if not float(pivots.min()) > RESOLVED * float(pivots.max()):
        gram = gram_matrix(block)
    return orthonormalize(block, gram)


def orthonormalize(block: Tensor, gram: Tensor) -> Tensor:
    """An orthonormal basis (m, k) of the columns of `block`, whose Gram matrix is `gram`.

    Cholesky-QR is many times faster than Householder-QR, which is used for dependent columns only.
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


def balanced_factors(
    image: Tensor, basis: Tensor, energies: Tensor, rotation: Tensor
) -> tuple[Tensor, Tensor]:
    """Factors of image basis^T, largest component first, both scaled alike.

    With image^T image = W S^2 W^T these are image W S^(-1/2) and basis W S^(1/2).

    Args:
        image: The matrix times `basis` (m, width).
        basis: Orthonormal (n, width).
        energies: The largest values of S^2 (rank,), ascending.
        rotation: The columns of W (width, rank) that belong to `energies`.
    """
    values = energies.flip(0).clamp_min(0).sqrt()
    rotation = rotation.flip(1)
    real = values > RESOLUTION * values[0]
    root = torch.where(real, values, 1).sqrt()
    return (
        (image.to(rotation.dtype) @ (rotation / root * real)).float(),
        (basis.to(rotation.dtype) @ (rotation * root * real)).float(),
    )
