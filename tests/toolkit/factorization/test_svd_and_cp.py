"""Truncated SVD and CP decomposition against numpy."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.factorization.cp_decomposition import (
    als,
    balance,
    compose,
    cp_decompose,
    cp_rank,
    cp_refit,
)
from toolkit.factorization.truncated_svd import truncated_svd, unroll

sizes = st.integers(1, 5)
shapes = st.tuples(sizes, sizes) | st.tuples(sizes, sizes, sizes, sizes)
seeds = st.integers(0, 2**32 - 1)


def drawn(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.from_numpy(drawn(shape, seed))


def relative_residual(target: torch.Tensor, factors: Sequence[torch.Tensor]) -> float:
    """||X - [[A]]|| / ||X||; 0 if both are zero."""
    residual = float((target - compose(factors)).norm())
    return residual / max(float(target.norm()), 1e-30)


def drawn_factors(shape: tuple[int, ...], rank: int, seed: int) -> list[torch.Tensor]:
    return [tensor((size, rank), seed + mode) for mode, size in enumerate(shape)]


@given(st.tuples(sizes, sizes, sizes, sizes), seeds)
def test_unrolled_convolution_has_inputs_and_rows_ahead(shape: tuple[int, ...], seed: int) -> None:
    weight = tensor(shape, seed)
    matrix, (outputs, inputs, rows, columns) = unroll(weight), shape
    assert matrix.shape == (inputs * rows, outputs * columns)
    for o, i, r, c in np.ndindex(*shape):
        assert matrix[i * rows + r, o * columns + c] == weight[o, i, r, c]


@given(sizes, sizes, st.integers(1, 5), seeds)
def test_truncated_svd_is_the_best_of_its_rank(m: int, n: int, rank: int, seed: int) -> None:
    matrix = drawn((m, n), seed)
    u, v = truncated_svd(torch.from_numpy(matrix), rank)
    left, values, right = np.linalg.svd(matrix)
    cut = min(rank, m, n)
    best = (left[:, :cut] * values[:cut]) @ right[:cut]
    assert u.shape == (m, cut)
    assert v.shape == (n, cut)
    np.testing.assert_allclose((u @ v.T).numpy(), best, rtol=0, atol=1e-5 * values[0])
    # Spectral initialisation: both sides carry the root of the singular values.
    for side in (u, v):
        np.testing.assert_allclose(
            side.norm(dim=0).numpy(), np.sqrt(values[:cut]), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ((784, 100), (59, 44)),
        ((100, 10), (6, 5)),
        ((3, 32, 3, 3), (14, 11)),
        ((32, 64, 3, 3), (120, 90)),
        ((64, 128, 3, 3), (248, 186)),
        ((128, 256, 3, 3), (504, 378)),
        ((256, 256, 3, 3), (759, 569)),
        ((256, 256), (85, 64)),
        ((256, 10), (6, 5)),
    ],
)
def test_cp_ranks_of_tdpfed_table_1(shape: tuple[int, ...], ranks: tuple[int, int]) -> None:
    assert (cp_rank(shape, 1.5), cp_rank(shape, 2.0)) == ranks
    assert cp_rank(shape[::-1], 2.0) == ranks[1]


def test_cp_rank_is_at_least_one() -> None:
    assert cp_rank((2, 2), 1000.0) == 1


@given(st.lists(sizes, min_size=2, max_size=4), sizes, seeds)
def test_compose_is_the_sum_of_outer_products(shape: list[int], rank: int, seed: int) -> None:
    factors = drawn_factors(tuple(shape), rank, seed)
    letters = "abcd"[: len(shape)]
    terms = ",".join(f"{letter}r" for letter in letters)
    expected = np.einsum(f"{terms}->{letters}", *(f.numpy() for f in factors))
    np.testing.assert_allclose(compose(factors).numpy(), expected, atol=1e-12)


# torch.testing takes a second to load when it is first used.
@settings(deadline=None)
@given(st.lists(sizes, min_size=2, max_size=4), sizes, seeds)
def test_balancing_leaves_the_tensor_and_levels_the_norms(
    shape: list[int], rank: int, seed: int
) -> None:
    factors = [100.0**mode * f for mode, f in enumerate(drawn_factors(tuple(shape), rank, seed))]
    balanced = balance(factors)
    whole = compose(factors)
    assert (compose(balanced) - whole).norm() <= 1e-5 * whole.norm() + 1e-30
    norms = torch.stack([factor.norm(dim=0) for factor in balanced])
    torch.testing.assert_close(norms, norms[:1].expand_as(norms), rtol=1e-4, atol=1e-6)


def test_balancing_keeps_a_component_that_is_zero() -> None:
    factors = drawn_factors((2, 3, 4), 2, 0)
    factors[1][:, 0] = 0
    balanced = balance(factors)
    assert all(torch.isfinite(factor).all() for factor in balanced)
    torch.testing.assert_close(compose(balanced).double(), compose(factors), rtol=1e-5, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 2), seeds)
def test_als_finds_a_tensor_of_low_rank(rank: int, seed: int) -> None:
    # Orthonormal columns: a well-posed problem, not one of the swamps that ALS is known for.
    factors = [torch.linalg.qr(f).Q for f in drawn_factors((6, 5, 4, 3), rank, seed)]
    found = cp_decompose(compose(factors), rank)
    assert relative_residual(compose(factors), [f.double() for f in found]) <= 1e-5


@settings(max_examples=25, deadline=None)
@given(st.tuples(*[st.integers(2, 5)] * 4), st.sampled_from([1.5, 2.0, 4.0]), seeds)
def test_no_sweep_of_als_makes_the_fit_worse(
    shape: tuple[int, ...], rate: float, seed: int
) -> None:
    target = tensor(shape, seed)
    factors = drawn_factors(shape, cp_rank(shape, rate), seed + 100)
    fit = math.inf
    for _ in range(6):
        factors = als(target, factors, 1)
        last, fit = fit, relative_residual(target, factors)
        assert fit <= last + 1e-6


@given(sizes, sizes, st.integers(1, 7), seeds)
def test_cp_of_a_matrix_is_its_best_approximation(m: int, n: int, rank: int, seed: int) -> None:
    matrix = tensor((m, n), seed)
    factors = cp_decompose(matrix, rank)
    assert [tuple(f.shape) for f in factors] == [(m, rank), (n, rank)]
    lost = np.linalg.svd(matrix.numpy(), compute_uv=False)[rank:]
    residual = float((matrix - compose(factors)).norm())
    assert residual == pytest.approx(float(np.linalg.norm(lost)), abs=1e-5 * float(matrix.norm()))


@settings(deadline=None)
@given(st.lists(st.integers(2, 5), min_size=3, max_size=4), st.integers(1, 2), seeds)
def test_a_sweep_is_least_squares_mode_by_mode(shape: list[int], rank: int, seed: int) -> None:
    target = tensor(tuple(shape), seed)
    factors = [f.numpy() for f in drawn_factors(tuple(shape), rank, seed + 1)]
    swept = compose(als(target, list(map(torch.from_numpy, factors)), 1))
    for mode in range(len(shape)):
        others = [factor for n, factor in enumerate(factors) if n != mode]
        columns = [functools.reduce(np.kron, [f[:, r] for f in others]) for r in range(rank)]
        unfolded = np.moveaxis(target.numpy(), mode, 0).reshape(shape[mode], -1)
        factors[mode] = np.linalg.lstsq(np.stack(columns, 1), unfolded.T)[0].T
    expected = compose([torch.from_numpy(f) for f in factors])
    left, best = (float((target - made).norm()) for made in (swept, expected))
    assert left == pytest.approx(best, abs=1e-4 * float(target.norm()))


def test_cp_of_zeros_is_zero() -> None:
    factors = cp_decompose(torch.zeros(4, 3, 3, 3), 2)
    assert not compose(factors).any()


def test_refit_comes_closer_to_a_moved_tensor(seed: int) -> None:
    target = tensor((8, 6, 3, 3), seed)
    factors = cp_decompose(target, 8)
    moved = target + 0.1 * tensor((8, 6, 3, 3), seed + 1)
    refitted = cp_refit(moved, factors)
    before = relative_residual(moved, [f.double() for f in factors])
    assert relative_residual(moved, [f.double() for f in refitted]) < before
    # Warm: the factors are the old ones moved, not another decomposition.
    for old, new in zip(factors, refitted, strict=True):
        assert (old - new).norm() < 0.5 * old.norm()
