"""CP decomposition of a weight by alternating least squares (TDPFed)."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from toolkit.factorization.truncated_svd import truncated_svd

FIRST_SWEEPS = 100
"""ALS sweeps for a tensor that has no factors yet."""

WARM_SWEEPS = 5
"""ALS sweeps from the factors of the last round; the fit improves from round to round."""

LEAST_GAIN = 1e-5
"""Relative gain of a sweep below which the sweeps stop."""

RIDGE = 1e-9
"""Ridge added to the Gram matrices of ALS, relative to their mean diagonal."""


def cp_rank(shape: Sequence[int], rate: float) -> int:
    """CP rank of a weight of `shape` at a compression rate (TDPFed eq. 23, 24).

    For a weight with I elements and modes of sizes I_n: I / (rate * sum of I_n), rounded to the
    nearest integer.
    """
    return max(1, math.floor(math.prod(shape) / (rate * sum(shape)) + 0.5))


def khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    """Column-wise Kronecker product of factors (I_n, R).

    The result is (product of I_n, R); the index of the last mode changes fastest.
    """
    product, *rest = factors
    for factor in rest:
        product = (product.unsqueeze(1) * factor.unsqueeze(0)).reshape(-1, factor.shape[1])
    return product


def compose(factors: Sequence[Tensor]) -> Tensor:
    """The tensor [[A_1, ..., A_N]] (I_1, ..., I_N) of factors (I_n, R), by one matrix product."""
    matrix = factors[0] @ khatri_rao(factors[1:]).T
    return matrix.reshape([factor.shape[0] for factor in factors])


def cp_decompose(weight: Tensor, rank: int) -> list[Tensor]:
    """Balanced CP factors (I_n, rank) of `weight`.

    Alternating least squares (`als`) starts from the leading singular vectors of `weight`. A matrix
    is decomposed by truncated SVD, which is the best factorization.
    """
    if weight.dim() == 2:
        columns, rows = truncated_svd(weight.T, min(rank, *weight.shape))
        # Components beyond the rank of the matrix are zero.
        pad = rank - rows.shape[1]
        return [torch.nn.functional.pad(side, (0, pad)) for side in (rows, columns)]
    target = weight.detach().double()
    # The leading vectors of each unfolding are a better start than random factors.
    start = [leading_vectors(target, mode, rank) for mode in range(target.dim())]
    return balance(als(target, start, FIRST_SWEEPS))


def cp_refit(weight: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """Balanced CP factors of `weight`, by a few ALS sweeps that start from `factors`."""
    start = [factor.double() for factor in factors]
    return balance(als(weight.detach().double(), start, WARM_SWEEPS))


def leading_vectors(target: Tensor, mode: int, rank: int) -> Tensor:
    """Left singular vectors of the unfolding of `mode`, padded to `rank` with random columns."""
    unfolded = target.movedim(mode, 0).reshape(target.shape[mode], -1)
    # The Gram matrix is small: its side is the size of one mode. The other side of the unfolding is
    # the product of all other modes.
    vectors = torch.linalg.eigh(unfolded @ unfolded.T).eigenvectors.flip(1)
    missing = max(0, rank - vectors.shape[1])
    generator = torch.Generator().manual_seed(mode)
    padding = torch.randn(vectors.shape[0], missing, generator=generator, dtype=target.dtype)
    return torch.cat([vectors[:, :rank], padding], 1)


def als(target: Tensor, factors: Sequence[Tensor], sweeps: int) -> list[Tensor]:
    """Alternating least squares (ALS) for CP factors.

    Each sweep solves for the factor of every mode in turn, with the other factors fixed:
    A_n = X_(n) K (K^T K)^-1. K is the Khatri-Rao product of the other factors. The Gram matrix of K
    is the elementwise product of the Gram matrices of these factors.

    Args:
        target: The tensor X to decompose (I_1, ..., I_N).
        factors: Factors (I_n, R) to start from.
        sweeps: Most sweeps; ALS stops earlier if a sweep improves the fit by less than LEAST_GAIN.

    Returns:
        The factors (I_n, R).
    """
    factors = list(factors)
    grams = [factor.T @ factor for factor in factors]
    energy = float(target.square().sum())
    fit = math.inf
    for _ in range(sweeps):
        for mode, products in enumerate(products_by_mode(target, factors)):
            gram = torch.stack(grams[:mode] + grams[mode + 1 :]).prod(0)
            factors[mode] = solve_factor(gram, products)
            grams[mode] = factors[mode].T @ factors[mode]
        # ||X - [[A]]||^2 = ||X||^2 - 2 <X, [[A]]> + ||[[A]]||^2. The last mode of the sweep gives
        # all of these without composing [[A]].
        inner = float((products * factors[-1]).sum())
        squared = energy - 2 * inner + float(torch.stack(grams).prod(0).sum())
        # Rounding may make the squared error slightly negative.
        last, fit = fit, math.sqrt(max(squared, 0) / max(energy, 1e-60))
        if last - fit <= LEAST_GAIN * fit:
            break
    return factors


def products_by_mode(target: Tensor, factors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield X_(n) K_n, of shape (I_n, R), for each mode n. X is `target`; see `als` for K_n.

    The product of X and the factors before n, component by component, is kept from mode to mode (a
    chain of the dimension tree). All modes together then need only two large matrix products. The
    caller may replace the factor of a mode after it was yielded; later modes use the new factor.
    """
    unfolded = target.reshape(target.shape[0], -1)
    yield unfolded @ khatri_rao(factors[1:])
    partial = (unfolded.T @ factors[0]).reshape(*target.shape[1:], -1)
    for mode in range(1, len(factors)):
        yield contract_later(partial, factors[mode + 1 :])
        partial = (partial * reshape_to_broadcast(factors[mode], partial)).sum(0)


def contract_later(partial: Tensor, later: Sequence[Tensor]) -> Tensor:
    """Contract `partial` (I_n, ..., I_N, R) with the factors of the modes after n.

    Each of the R components is contracted separately. The result is (I_n, R).
    """
    for factor in reversed(later):
        partial = (partial * factor).sum(-2)
    return partial


def reshape_to_broadcast(factor: Tensor, partial: Tensor) -> Tensor:
    """Reshape (I_n, R) to (I_n, 1, ..., 1, R), which can be multiplied with (I_n, ..., I_N, R)."""
    size, rank = factor.shape
    return factor.reshape(size, *[1] * (partial.dim() - 2), rank)


def solve_factor(gram: Tensor, products: Tensor) -> Tensor:
    """The factor (I_n, R) whose product with `gram` (R, R) is `products` (I_n, R)."""
    # Nearly collinear components make the Gram matrix singular. The ridge keeps it solvable.
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    root, failed = torch.linalg.cholesky_ex(gram)
    if failed:
        inverse: Tensor = torch.linalg.pinv(gram, hermitian=True)
        return products @ inverse
    solution: Tensor = torch.cholesky_solve(products.T, root).T
    return solution


def balance(factors: Sequence[Tensor]) -> list[Tensor]:
    """Scale factors so that all modes share the norm of each component equally.

    The composed tensor stays the same. One learning rate then suits all factors.
    """
    norms = [factor.norm(dim=0) for factor in factors]
    shared = torch.stack(norms).prod(0) ** (1 / len(factors))
    return [
        (factor * torch.where(norm > 0, shared / norm.clamp_min(1e-30), 0)).float()
        for factor, norm in zip(factors, norms, strict=True)
    ]
