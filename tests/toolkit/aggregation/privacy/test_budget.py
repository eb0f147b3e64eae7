"""Epsilon against published figures, against dp-accounting itself, and against its definition."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy.optimize import brentq
from scipy.stats import norm

from refusals import refused
from toolkit.aggregation.privacy.budget import PrivacyBudget, PrivacyPlan, Sampled, noise_for

PUBLISHED = {
    # Abadi et al. 2016, section 5.1 (figure 2): 100 epochs with lots of 1%, sigma = 4.
    "Abadi et al. 2016": (0.01, 4.0, 10_000, 1e-5, 1.26),
    # TensorFlow Privacy, `compute_dp_sgd_privacy`: 60 epochs of MNIST with batches of 256.
    "compute_dp_sgd_privacy": (256 / 60_000, 1.12, 14_063, 1e-5, 2.92),
    # TensorFlow Privacy, the table of its tutorials on MNIST: 15 and 45 epochs.
    "tutorial, 15 epochs": (256 / 60_000, 1.3, 3_516, 1e-5, 1.19),
    "tutorial, 45 epochs": (256 / 60_000, 0.7, 10_547, 1e-5, 7.10),
}


@pytest.mark.parametrize("setting", PUBLISHED)
def test_settings_of_the_literature(setting: str) -> None:
    """Later bounds are tighter: ours is below the published figure, and above the truth."""
    probability, noise, rounds, delta, published = PUBLISHED[setting]
    found = PrivacyBudget(delta).spent([Sampled(probability, noise)] * rounds)
    sampled = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(noise))
    own, tight = rdp.RdpAccountant(), pld.PLDAccountant()
    for accountant in (own, tight):
        accountant.compose(sampled, rounds)
    assert found == pytest.approx(own.get_epsilon(delta), rel=1e-9)
    assert tight.get_epsilon(delta) < found < published < 1.3 * found


def test_rounds_of_all_devices_are_one_gaussian_mechanism() -> None:
    """Balle and Wang 2018, theorem 8: delta of the Gaussian mechanism, exactly. The bound by
    Renyi's divergence is at most a fifth above it."""
    delta, noise, rounds = 1e-6, 8.0, 20
    sigma = noise / math.sqrt(rounds)

    def excess(epsilon: float) -> float:
        low, high = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
        return float(norm.cdf(low) - math.exp(epsilon) * norm.cdf(high)) - delta

    exact = brentq(excess, 0.01, 20)
    found = PrivacyBudget(delta).spent([Sampled(1.0, noise)] * rounds)
    assert exact < found < 1.2 * exact


@pytest.mark.parametrize(("epsilon", "probability", "rounds"), [(1.0, 1.0, 40), (3.0, 0.1, 20)])
def test_the_noise_is_the_smallest_that_is_enough(
    epsilon: float, probability: float, rounds: int
) -> None:
    noise = noise_for(epsilon, 1e-5, probability, rounds)
    budget = PrivacyBudget(1e-5)
    assert budget.spent([Sampled(probability, noise)] * rounds) <= epsilon
    assert budget.spent([Sampled(probability, noise / 1.006)] * rounds) > epsilon


def test_a_plan_counts_what_earlier_rounds_have_spent_with_other_noise() -> None:
    plan = PrivacyPlan(0.5, 2.0, PrivacyBudget(1e-4, 6.0))
    spent, count = None, 0
    earlier = []
    while plan.allows_another(earlier, 0.5):
        spent = plan.after(earlier, 0.5)
        earlier, count = [*earlier, spent], count + 1
    assert spent is not None
    assert spent.epsilon <= 6.0 < PrivacyBudget(1e-4).spent([Sampled(0.5, 2.0)] * (count + 1))
    other = PrivacyPlan(0.5, 5.0, PrivacyBudget(1e-4)).after(earlier, 1.0)
    assert other.epsilon == pytest.approx(
        PrivacyBudget(1e-4).spent([Sampled(1.0, 5.0), *[Sampled(0.5, 2.0)] * count])
    )
    assert (other.probability, other.noise_multiplier, other.budget) == (1.0, 5.0, None)


def test_an_impossible_budget_is_refused() -> None:
    with refused("privacy.impossible", epsilon=1e-6, rounds=100):
        noise_for(1e-6, 1e-15, 1.0, 100)


def test_the_clip_finds_the_quantile_of_the_norms(seed: int) -> None:
    """A thousand norms, of which 70% are below 1, seen only through noised shares."""
    draw = np.random.default_rng(seed)
    plan, earlier = PrivacyPlan(5.0, 1.0, PrivacyBudget(1e-5), quantile=0.7), []
    for _ in range(80):
        noise = plan.noise(earlier, 1000)
        votes = sum(noise.vote(norm) for norm in draw.lognormal(-0.5244, 1.0, 1000))
        within = noise.share_within(votes, draw.normal())
        earlier.append(plan.after(earlier, 1.0, within))
    clips = [spent.clip for spent in earlier]
    assert clips[0] == 5
    assert np.mean(clips[-10:]) == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("devices", [3, 20, 1000])
def test_the_clip_and_the_sum_cost_together_what_the_plan_says(devices: int) -> None:
    """Both together are one Gaussian mechanism: its sensitivity is the root of the squares."""
    plan = PrivacyPlan(0.3, 2.0, PrivacyBudget(1e-5), quantile=0.5)
    noise = plan.noise([], devices)
    assert noise.count_deviation is not None
    both = math.hypot(noise.clip / noise.deviation, 0.5 / noise.count_deviation)
    assert both == pytest.approx(1 / 2.0)
    assert noise.deviation <= 1.061 * 2.0 * 0.3
