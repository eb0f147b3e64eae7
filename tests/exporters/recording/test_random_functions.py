"""Draws of torch are recorded as functions of uniform numbers, which depend on the seed alone."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from between_layers import Between, Compute
from exporters.programs.seeded_random import SeededBernoulli, uniform_numbers
from exporters.recording.capture import capture
from exporters.recording.replacements.random_functions import uniform_draws
from exporters.recurrence.replacements import Replacements
from parameters import half_quick

RANDOM = {
    "rand": lambda h: torch.rand_like(input=h),
    "randn": lambda h: torch.randn_like(input=h),
    "randint": lambda h: torch.randint_like(input=h, low=1, high=5),
    "bernoulli": lambda h: torch.bernoulli(input=h.sigmoid()),
}


@pytest.mark.parametrize("name", RANDOM)
def test_arguments_of_draws_may_be_named(name: str) -> None:
    with uniform_draws(), SeededBernoulli(1):
        assert RANDOM[name](torch.zeros(4, 8)).shape == (4, 8)


DRAWS: dict[str, Compute] = {
    "randn of a shape": lambda h: h + torch.randn(h.shape) * 0.1,
    "randn of sizes": lambda h: h + torch.randn(h.size(0), 8, device=h.device),
    "randn of a named size": lambda h: h + torch.randn(size=(h.size(0), 8)),
    "rand like": lambda h: h * torch.rand_like(h),
    "normal in place": lambda h: h + torch.empty_like(h).normal_(0, 0.1),
    "normal around": lambda h: torch.normal(h, 0.1),
    "uniform in place": lambda h: h + torch.zeros_like(h).uniform_(-0.1, 0.1),
    "gumbel softmax": lambda h: functional.gumbel_softmax(h, tau=0.5, hard=True),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()),
    "branches": lambda h: h * torch.empty(h.shape[0], 1).bernoulli_(0.8) / 0.8,
    "reparameterised": lambda h: torch.distributions.Normal(h, h.exp()).rsample(),
    "integers": lambda h: h * torch.randint(1, 5, (h.size(0), 1)),
    "masked tokens": lambda h: h * (torch.rand(h.size(0), 8).argsort(1) < 4),
    "permuted features": lambda h: h[:, torch.randperm(8)],
    "slopes": lambda h: nn.RReLU(0.1, 0.5)(h),
    "slopes in place": lambda h: functional.rrelu(h * 2, training=True, inplace=True),
    "alpha dropout": lambda h: functional.alpha_dropout(h, 0.3, training=True),
    "feature alpha dropout": lambda h: functional.feature_alpha_dropout(
        h.view(-1, 4, 2), 0.3, training=True
    ).flatten(1),
}


@pytest.mark.parametrize("name", half_quick(DRAWS))
def test_draws_repeat_with_the_seed(name: str) -> None:
    model = Between(DRAWS[name])
    capture(model, (6,))  # compares outputs and gradients of model and recording for one seed
    x, results = torch.randn(4, 6), []
    for seed in (1, 1, 2):
        with SeededBernoulli(seed), uniform_draws():
            results.append(model(x))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_draw_that_no_output_needs_does_not_shift_the_others() -> None:
    def posterior(h: Tensor) -> Tensor:
        for _ in range(2):  # as in world models: the prior's sample is not used
            prior, posterior = h + torch.randn_like(h), h.tanh() + 0.1 * torch.randn_like(h)
            h = posterior if prior is not None else prior
        return h

    capture(Between(posterior), (6,))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_alpha_dropout_maps_numbers_as_pytorch(share: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(200, 50, dtype=torch.float64)
    own = functional.alpha_dropout(x, share, training=True)
    dropped = own == own.flatten().mode().values  # one value for all of them
    (slope, offset) = np.polyfit(x[~dropped].numpy(), own[~dropped].numpy(), 1)
    with SeededBernoulli(seed % (2**31 - 1)), uniform_draws():
        ours = functional.alpha_dropout(x, share, training=True)
        channels = functional.feature_alpha_dropout(x[:, :, None].expand(-1, -1, 3), share, True)
    gone = ours == ours.flatten().mode().values
    torch.testing.assert_close(ours[gone], own[dropped][0].expand(int(gone.sum())))
    torch.testing.assert_close(ours[~gone], x[~gone] * slope + offset)
    assert abs(float(gone.double().mean()) - share) <= 5 * math.sqrt(share * (1 - share) / 10_000)
    assert torch.equal(channels, channels[:, :, :1].expand_as(channels))


def test_draws_have_their_distribution(seed: int) -> None:
    """Means, deviations and correlations within five deviations of their own."""
    n = 40_000
    with SeededBernoulli(seed % (2**31 - 1)), uniform_draws():
        normal, other, uniform = torch.randn(n // 100, 100), torch.randn(n), torch.rand(n)
        integers, waits = torch.randint(3, 7, (n,)), torch.empty(n).exponential_(2.0)
        order = torch.randperm(50)
    normal = normal.flatten()
    for values, mean, variance in (
        (normal, 0.0, 1.0),
        (normal**2, 1.0, 2.0),
        (normal**4, 3.0, 96.0),
        (normal * other, 0.0, 1.0),
        (normal * normal.roll(1), 0.0, 1.0),
        (normal * normal.roll(100), 0.0, 1.0),
        (uniform, 0.5, 1 / 12),
        (integers.double(), 4.5, 1.25),
        (waits, 0.5, 0.25),
    ):
        assert abs(float(values.double().mean()) - mean) <= 5 * math.sqrt(variance / n)
    assert sorted(order.tolist()) == list(range(50))
    assert set(integers.tolist()) == {3, 4, 5, 6}


INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one bound": lambda like: torch.randint(3, like.shape) + 7,
    "two bounds": lambda like: torch.randint(7, 10, like.shape),
    "a named bound": lambda like: torch.randint(7, high=10, size=like.shape),
    "named bounds": lambda like: torch.randint(low=7, high=10, size=like.shape),
    "like a tensor": lambda like: torch.randint_like(like, 7, 10),
    "like a tensor, a named bound": lambda like: torch.randint_like(like, 7, high=10),
    "like a tensor, one named bound": lambda like: torch.randint_like(like, high=3) + 7,
    "single numbers": lambda like: torch.stack([torch.randint(7, 10, size=()) for _ in like]),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_drawn_between_their_bounds(name: str) -> None:
    for context in (uniform_draws(), Replacements({})):
        with context, SeededBernoulli(1):
            drawn = INTEGERS[name](torch.zeros(200))
        assert set(drawn.tolist()) == {7, 8, 9}


def test_uniform_numbers_are_exact_in_float32_and_never_the_ends(seed: int) -> None:
    drawn = uniform_numbers((1000, 100), torch.tensor(seed % (2**31 - 1)), 1)
    assert drawn.dtype == torch.float32
    assert torch.equal((drawn * 2**24).double(), drawn.double() * 2**24)
    assert 0 < float(drawn.min()) < float(drawn.max()) < 1
