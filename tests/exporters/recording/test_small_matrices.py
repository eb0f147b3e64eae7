"""Inverses, determinants and factors of small matrices: the same as torch's in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from exporters.recording.replacements.function_forms.small_matrices import SMALL_MATRICES
from exporters.recurrence.replacements import Replacements


def covariance(x: Tensor) -> Tensor:
    return x @ x.mT + 0.5 * torch.eye(4, dtype=x.dtype)


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "inverse": torch.inverse,
    "inverse by a method": lambda x: covariance(x).inverse(),
    "pivots": lambda x: torch.linalg.inv(x * (1 - torch.eye(4, dtype=x.dtype))),
    "vectors": lambda x: torch.linalg.solve(x, x[:, 0].exp()),
    "matrices": lambda x: torch.linalg.solve(x, x[:, :, :2].exp()),
    "logarithm": lambda x: torch.slogdet(x)[1],
    "sign": lambda x: torch.linalg.slogdet(x).sign * x[:, 0, 0],
    "determinant": torch.det,
    "determinant of a covariance": lambda x: covariance(x).logdet(),
    "one matrix": lambda x: torch.linalg.det(x[0]),
    "factor": lambda x: torch.linalg.cholesky(covariance(x)),
    "lower triangle": lambda x: torch.linalg.cholesky(x + 9 * torch.eye(4, dtype=x.dtype)).exp(),
    "upper factor": lambda x: torch.linalg.cholesky(covariance(x), upper=True),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_results_and_gradients_are_torchs(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for replacements in ({}, SMALL_MATRICES):
        with Replacements(replacements):
            y = COMPUTED[name](x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            found.append((y.detach(), gradient))
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).norm() <= 1e-8 * (1 + expected.norm())
