"""The factorizer against numpy's SVD: error, repeatability, independence of earlier requests."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models_for_tests import INPUT_SHAPE
from parameters import half_quick
from toolkit.aggregation.federation import Federation
from toolkit.factorization.factorizer import LEAST_SIDE, Factorizer
from toolkit.factorization.subspace_iteration import (
    TOLERANCE,
    StepRecord,
    converged,
    leading_components,
    orthonormal_basis,
    orthonormalize,
)
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig

ROUNDING = 1e-5
"""Rounding of float32 factors, relative to the norm of the matrix."""

SPECTRA = {
    "power 1/4": lambda i: i**-0.25,
    "power 1": lambda i: 1 / i,
    "power 2": lambda i: i**-2.0,
    "exponential": lambda i: np.exp(-i / 30),
    "steep": lambda i: np.exp(-i / 6),
    "steeper": lambda i: i**-4.0,
    "over a floor": lambda i: np.exp(-i / 20) + 0.1,
    "linear": lambda i: 1 - i / (i.size + 1),
    "plateaus": lambda i: np.where(i <= 60, 1, 0.85),
    "equal": lambda i: np.ones(i.size),
    "rank 20": lambda i: 1.0 * (i <= 20),
    "rank 70": lambda i: 1.0 * (i <= 70),
}


def random_matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """The flattest spectrum: a layer with initial weights."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, columns))).float()


def with_spectrum(name: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    drawn = np.random.default_rng(seed).normal(size=(rows, columns))
    left, _, right = np.linalg.svd(drawn, full_matrices=False)
    values = SPECTRA[name](np.arange(1, left.shape[1] + 1))
    return torch.from_numpy((left * values) @ right).float()


def errors(matrix: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> tuple[float, float]:
    """Frobenius errors of U V^T and of the best truncation, by numpy's SVD."""
    exact = matrix.double().numpy()
    lost = np.linalg.svd(exact, compute_uv=False)[u.shape[1] :]
    error = np.linalg.norm(exact - u.double().numpy() @ v.double().numpy().T)
    return float(error), float(np.linalg.norm(lost))


def check_error(matrix: torch.Tensor, u: torch.Tensor, v: torch.Tensor, allowed: float) -> None:
    """U V^T has at most `allowed` more error than the best truncation."""
    error, best = errors(matrix, u, v)
    assert error <= (1 + allowed) * best + ROUNDING * float(matrix.norm())


def check_balanced(u: torch.Tensor, v: torch.Tensor) -> None:
    """Orthogonal columns of equal norms on both sides."""
    for side in (u.double(), v.double()):
        gram = side.T @ side
        assert (gram - gram.diagonal().diag()).norm() <= 1e-4 * gram.norm()
    scale = float(u.norm())
    torch.testing.assert_close(u.norm(dim=0), v.norm(dim=0), rtol=1e-3, atol=1e-3 * scale)


@pytest.mark.parametrize("spectrum", half_quick(SPECTRA))
def test_error_is_near_the_best(spectrum: str, seed: int) -> None:
    shape = np.random.default_rng(seed).choice([(400, 400), (300, 420), (500, 270)])
    matrix = with_spectrum(spectrum, *shape.tolist(), seed)
    for rank in (1, 8, 30, 44, 66):
        u, v = Factorizer().truncated("layer", matrix, rank)
        check_error(matrix, u, v, TOLERANCE)
        check_balanced(u, v)


@pytest.mark.parametrize("spectrum", half_quick(SPECTRA))
def test_over_the_ratios_the_error_is_within_one_percent(spectrum: str, seed: int) -> None:
    matrix = with_spectrum(spectrum, 384, 384, seed)
    pairs = [
        errors(matrix, *Factorizer().truncated("layer", matrix, rank)) for rank in (64, 32, 16)
    ]
    reached, best = np.linalg.norm(pairs, axis=0)
    assert reached <= 1.01 * best + ROUNDING * float(matrix.norm())


@settings(max_examples=15, deadline=None)
@given(
    st.integers(LEAST_SIDE, 400),
    st.integers(LEAST_SIDE, 400),
    st.integers(1, 420),
    st.integers(0, 2**32),
)
def test_random_matrices_of_any_shape(rows: int, columns: int, rank: int, seed: int) -> None:
    matrix = random_matrix(rows, columns, seed)
    u, v = Factorizer().truncated("layer", matrix, rank)
    cut = min(rank, rows, columns)
    assert (u.shape, v.shape) == ((rows, cut), (columns, cut))
    check_error(matrix, u, v, TOLERANCE)


@pytest.mark.parametrize("shape", [(300, 300), (40, 60)])
def test_a_zero_matrix_has_zero_factors(shape: tuple[int, int]) -> None:
    u, v = Factorizer().truncated("layer", torch.zeros(shape), 10)
    assert not u.any()
    assert not v.any()


@pytest.mark.parametrize("shape", [(300, 280), (40, 60)])
def test_full_rank_is_exact(shape: tuple[int, int], seed: int) -> None:
    matrix = random_matrix(*shape, seed)
    u, v = Factorizer().truncated("layer", matrix, min(shape))
    assert (u @ v.T - matrix).norm() <= ROUNDING * matrix.norm()


def test_exact_is_the_best_truncation(seed: int) -> None:
    matrix = random_matrix(300, 300, seed)
    check_error(matrix, *Factorizer(exact=True).truncated("layer", matrix, 50), allowed=0)


def test_the_same_weights_give_the_same_factors(seed: int) -> None:
    matrix = random_matrix(300, 400, seed)
    first, second = (Factorizer().truncated("layer", matrix, 40) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_what_else_was_asked_makes_no_difference(seed: int) -> None:
    rounds = [with_spectrum("power 1", 300, 300, seed)]
    rounds.append(rounds[0] + 1e-3 * random_matrix(300, 300, seed + 1) / 300)
    answers = []
    for ranks in ([10, 40, 90, 200], [200, 90, 40, 10], [40]):
        factorizer = Factorizer()
        for matrix in rounds:
            made = {rank: factorizer.truncated("layer", matrix, rank) for rank in ranks}
        answers.append(made[40])
    assert all(torch.equal(answers[0][side], other[side]) for other in answers for side in (0, 1))


def test_a_smaller_rank_is_the_beginning_of_a_larger_one(seed: int) -> None:
    factorizer, matrix = Factorizer(), random_matrix(300, 300, seed)
    small, large = (factorizer.truncated("layer", matrix, rank) for rank in (10, 50))
    assert all(torch.equal(a, b[:, :10]) for a, b in zip(small, large, strict=True))


@pytest.mark.parametrize("change", [1e-6, 1e-2, 1.0])
def test_rounds_go_on_from_the_last_subspace(change: float, seed: int) -> None:
    factorizer, matrix = Factorizer(), random_matrix(320, 320, seed)
    for number in range(4):
        u, v = factorizer.truncated("layer", matrix, 50)
        check_error(matrix, u, v, TOLERANCE)
        matrix = matrix + change * random_matrix(320, 320, seed + 1 + number)


def test_a_weight_changed_in_place_is_factorized_again(seed: int) -> None:
    factorizer, matrix = Factorizer(), random_matrix(300, 300, seed)
    factorizer.truncated("layer", matrix, 50)
    matrix *= 2
    check_error(matrix, *factorizer.truncated("layer", matrix, 50), TOLERANCE)


@pytest.mark.parametrize(("change", "warm"), [(0.01, True), (1.0, False)])
def test_only_a_small_change_starts_from_the_last_subspace(
    change: float, warm: bool, seed: int
) -> None:
    factorizer, matrix = Factorizer(), random_matrix(300, 300, seed)
    factorizer.truncated("layer", matrix, 50)
    moved = matrix + change * random_matrix(300, 300, seed + 1)
    cold = Factorizer().truncated("layer", moved, 50)
    assert torch.equal(factorizer.truncated("layer", moved, 50)[0], cold[0]) != warm


def test_a_layer_may_take_another_shape(seed: int) -> None:
    factorizer = Factorizer()
    for rows in (300, 310):
        matrix = random_matrix(rows, 300, seed)
        check_error(matrix, *factorizer.truncated("layer", matrix, 40), TOLERANCE)


def test_rounds_share_a_factorizer_until_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation = Federation("models_for_tests:smooth_cnn", INPUT_SHAPE, TrainingConfig())
    first = federation.model.factorizer
    monkeypatch.setattr(
        "toolkit.aggregation.federation.aggregate",
        lambda model, *_, **other: GlobalModel(model.tensors),
    )
    federation.fold([])
    assert federation.model.factorizer is first
    federation.load(federation.save())
    assert federation.model.factorizer is not first


def test_dependent_columns_still_get_an_orthonormal_basis(seed: int) -> None:
    block = random_matrix(300, 20, seed)
    block[:, 1] = block[:, 0]
    basis = orthonormalize(block, block.double().T @ block.double())
    torch.testing.assert_close(basis.T @ basis, torch.eye(20), rtol=0, atol=1e-5)
    torch.testing.assert_close(basis @ (basis.T @ block), block, rtol=0, atol=1e-4)


def test_iteration_that_does_not_settle_says_so(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("toolkit.factorization.subspace_iteration.MOST_STEPS", 2)
    matrix = random_matrix(300, 300, seed)
    assert leading_components(matrix, 50) is None
    # The exact SVD takes over.
    check_error(matrix, *Factorizer().truncated("layer", matrix, 50), allowed=0)


@pytest.mark.parametrize("spectrum", half_quick(SPECTRA))
def test_the_iteration_settles_without_the_exact_svd(spectrum: str, seed: int) -> None:
    matrix = with_spectrum(spectrum, 300, 300, seed)
    assert leading_components(matrix, 50) is not None


@pytest.mark.parametrize("q", [0.3, 0.6, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("share", [None, 0.2, 0.5])
def test_on_two_plateaus_the_estimate_allows_no_more_than_the_tolerance(
    q: float, share: float | None
) -> None:
    """Of q times the energy: half-steps shrink the error by q, a leap by ((q - s) / (1 - s))^2."""
    factor = q if share is None else ((q - share) / (1 - share)) ** 2
    verdicts = []
    for start in np.geomspace(1e-4, 0.5, 60):
        left = start * np.array([1, factor, factor * q])
        history = [StepRecord(torch.tensor([1 - lost]), share) for lost in left.tolist()]
        total = 2.0
        allowed = 2 * TOLERANCE * (total - 1 + left[-1])
        # Few half-steps: the estimate for a spectrum without gaps has no say.
        says = converged(0, history, total)
        assert not says or left[-1] <= 1.01 * allowed or (left[1] - left[2]) <= 1e-4 * total
        verdicts.append(says)
    assert verdicts[0]


@pytest.mark.parametrize("least", [1.0, 0.1, 0.05, 0.01, 1e-3])
def test_an_ill_conditioned_block_gets_an_orthonormal_basis(least: float, seed: int) -> None:
    left, _, right = torch.linalg.svd(random_matrix(300, 20, seed), full_matrices=False)
    block = (left * torch.logspace(0, np.log10(least), 20)) @ right
    basis = orthonormal_basis(block)
    torch.testing.assert_close(basis.T @ basis, torch.eye(20), rtol=0, atol=1e-5)
    torch.testing.assert_close(basis @ (basis.T @ block), block, rtol=0, atol=1e-5)
