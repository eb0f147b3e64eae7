"""Draws from gamma, beta and Dirichlet distributions by a fixed number of uniform numbers."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, distributions

from between_layers import Between, Compute
from exporters.programs.seeded_random import SeededBernoulli
from exporters.recording.capture import capture
from exporters.recording.replacements.gamma_draws import beta, gamma
from exporters.recording.replacements.random_functions import uniform_draws
from refusals import refused

N = 20_000
DISTRIBUTIONS: dict[str, tuple[Callable[[], Tensor], Any]] = {
    "gamma of a small shape": (
        lambda: distributions.Gamma(torch.tensor(0.2), torch.tensor(1.0)).sample((N,)),
        stats.gamma(0.2),
    ),
    "gamma with a rate": (
        lambda: distributions.Gamma(torch.tensor(3.5), torch.tensor(2.0)).sample((N,)),
        stats.gamma(3.5, scale=0.5),
    ),
    "beta of mixup": (lambda: distributions.Beta(0.2, 0.2).sample((N,)), stats.beta(0.2, 0.2)),
    "beta": (lambda: distributions.Beta(2.0, 5.0).sample((N,)), stats.beta(2, 5)),
    "one of a Dirichlet": (
        lambda: distributions.Dirichlet(torch.tensor([0.5, 1.5, 1.0])).sample((N,))[:, 1],
        stats.beta(1.5, 1.5),
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_have_the_distribution(name: str, seed: int) -> None:
    draw, right = DISTRIBUTIONS[name]
    with uniform_draws(), SeededBernoulli(seed % (2**31 - 1)):
        drawn = draw().double().numpy()
    # A right distribution is farther away in one of ten million runs.
    assert stats.kstest(drawn, right.cdf).statistic < math.sqrt(-0.5 * math.log(5e-8) / N)


@pytest.mark.parametrize(
    ("draw", "own", "arguments"),
    [(beta, np.random.beta, (2.0, 3.0)), (gamma, random.gammavariate, (2.0, 3.0))],
)
def test_single_numbers_are_those_of_numpy_and_python(
    draw: Callable[..., Tensor], own: Callable[..., float], arguments: tuple[float, ...], seed: int
) -> None:
    with SeededBernoulli(seed % (2**31 - 1)):
        ours = [float(draw(*arguments)) for _ in range(1000)]
    test = stats.ks_2samp(ours, [own(*arguments) for _ in range(1000)])
    assert test.pvalue > 1e-7


DRAWS: dict[str, Compute] = {
    "mixup by torch": lambda h: h * distributions.Beta(0.3, 0.3).sample((h.shape[0], 1)),
    "mixup by NumPy": lambda h: h * np.random.beta(0.3, 0.3),
    "mixup by Python": lambda h: h * random.betavariate(0.3, 0.3),
    "a shape for each sample": lambda h: h * distributions.Gamma(h.exp(), h.exp()).sample(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_recorded(name: str) -> None:
    capture(Between(DRAWS[name]), (6,))


def test_the_gradient_of_a_shape_is_refused_with_its_line() -> None:
    def drawn(h: Tensor) -> Tensor:
        return h * distributions.Gamma(h.exp(), h.exp()).rsample()

    with refused("model.random-numbers") as caught:
        capture(Between(drawn), (6,))
    assert "rsample()" in str(caught.value)
    assert "test_gamma_draws.py, line" in str(caught.value)
