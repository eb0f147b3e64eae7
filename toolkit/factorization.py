"""Factorizing weights: truncated SVD (FedHM) and CP decomposition (TDPFed)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_SWEEPS = 100
"""ALS sweeps for a tensor that has no factors yet."""

WARM_SWEEPS = 5
"""ALS sweeps from the last round's factors; the fit improves over the rounds by itself."""

STEADY = 1e-5
"""Relative gain of a sweep below which the sweeps stop."""

RIDGE = 1e-9
"""Ridge on the Gram matrices of ALS, relative to their mean diagonal."""


def unroll(weight: Tensor) -> Tensor:
    """(n, m, kh, kw) to FedHM's (m * kh, n * kw), (n, m, k) to (m * k, n), (n, m) to (m, n)."""
    if weight.dim() == 2:
        return weight.T
    outputs, inputs, rows, *columns = weight.shape
    moved = weight.movedim(0, 2)
    return moved.reshape(inputs * rows, outputs * math.prod(columns))


def roll(matrix: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `unroll` for a weight of `shape`."""
    if len(shape) == 2:
        return matrix.T
    outputs, inputs, rows, *columns = shape
    return matrix.reshape(inputs, rows, outputs, *columns).movedim(2, 0)


def truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (m, rank) and V (n, rank) with U V^T the best approximation of `matrix` (m, n).

    Spectral initialisation: each side takes the square root of the singular values.
    """
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).float(), (vh[:rank].T * root).float()


def cp_rank(shape: Sequence[int], rate: float) -> int:
    """CP rank at compression `rate`: TDPFed eq. 23, 24, rounded to the nearest whole number.

    For a weight of `shape` with I numbers and modes of sizes I_n: I / (rate * sum of I_n).
    """
    return max(1, math.floor(math.prod(shape) / (rate * sum(shape)) + 0.5))


def khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    """Column-wise Kronecker product of factors (I_n, R): (product of I_n, R), last mode fastest."""
    product, *rest = factors
    for factor in rest:
        product = (product.unsqueeze(1) * factor.unsqueeze(0)).reshape(-1, factor.shape[1])
    return product


def compose(factors: Sequence[Tensor]) -> Tensor:
    """[[A_1, ..., A_N]] of factors (I_n, R), as one matrix product; shape (I_1, ..., I_N)."""
    matrix = factors[0] @ khatri_rao(factors[1:]).T
    return matrix.reshape([factor.shape[0] for factor in factors])


def cp_decompose(weight: Tensor, rank: int) -> list[Tensor]:
    """Balanced CP factors (I_n, rank) of `weight` by ALS from its leading singular vectors.

    A matrix is decomposed exactly, by truncated SVD.
    """
    if weight.dim() == 2:
        columns, rows = truncated_svd(weight.T, min(rank, *weight.shape))
        pad = rank - rows.shape[1]
        return [torch.nn.functional.pad(side, (0, pad)) for side in (rows, columns)]
    target = weight.detach().double()
    start = [leading_vectors(target, mode, rank) for mode in range(target.dim())]
    return balance(als(target, start, FIRST_SWEEPS))


def cp_refit(weight: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """CP factors of `weight` after a few ALS sweeps from `factors`, balanced."""
    start = [factor.double() for factor in factors]
    return balance(als(weight.detach().double(), start, WARM_SWEEPS))


def leading_vectors(target: Tensor, mode: int, rank: int) -> Tensor:
    """Left singular vectors of the unfolding of `mode`, filled up to `rank` with random columns."""
    unfolded = target.movedim(mode, 0).reshape(target.shape[mode], -1)
    vectors, _, _ = torch.linalg.svd(unfolded, full_matrices=False)
    missing = max(0, rank - vectors.shape[1])
    generator = torch.Generator().manual_seed(mode)
    filling = torch.randn(vectors.shape[0], missing, generator=generator, dtype=target.dtype)
    return torch.cat([vectors[:, :rank], filling], 1)


def als(target: Tensor, factors: list[Tensor], sweeps: int) -> list[Tensor]:
    """Alternating least squares: each sweep solves for every mode's factor with the others fixed.

    A_n = X_(n) K (K^T K)^-1 with K the Khatri-Rao product of the other factors, whose Gram matrix
    is the elementwise product of theirs. Stops early where a sweep gains next to nothing.
    """
    unfolded = [target.movedim(n, 0).reshape(target.shape[n], -1) for n in range(target.dim())]
    fit = math.inf
    for _ in range(sweeps):
        for mode, matrix in enumerate(unfolded):
            others = [factor for n, factor in enumerate(factors) if n != mode]
            gram = torch.stack([factor.T @ factor for factor in others]).prod(0)
            # Nearly collinear components make the Gram matrix singular; this keeps it solvable.
            gram.diagonal().add_(RIDGE * gram.diagonal().mean())
            factors[mode] = torch.linalg.solve(gram, (matrix @ khatri_rao(others)).T).T
        last, fit = fit, relative_residual(target, factors)
        if last - fit < STEADY * fit:
            break
    return factors


def relative_residual(target: Tensor, factors: Sequence[Tensor]) -> float:
    """||X - [[A]]|| / ||X||; 0 for a zero tensor that is met."""
    residual = float((target - compose(factors)).norm())
    return residual / max(float(target.norm()), 1e-30)


def balance(factors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensor with every component's norm shared equally by all modes.

    One step size then suits all factors.
    """
    norms = [factor.norm(dim=0) for factor in factors]
    shared = torch.stack(norms).prod(0) ** (1 / len(factors))
    return [
        (factor * torch.where(norm > 0, shared / norm.clamp_min(1e-30), 0)).float()
        for factor, norm in zip(factors, norms, strict=True)
    ]
