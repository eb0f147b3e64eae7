"""Computes how much differential privacy for samples a device has spent, as (epsilon, delta).

Each step adds Gaussian noise to a sum over a Poisson batch. The Renyi divergence of order a of a
step is

    1 / (a - 1) ln sum_k C(a, k) (1 - q)^(a - k) q^k exp((k^2 - k) / (2 z^2))

for whole a, sampling probability q and noise multiplier z (Mironov et al. 2019, eq. 5). The
divergences of all steps are added up. Canonne et al. 2020, proposition 12, convert the sum to
(epsilon, delta).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

ORDERS = (*range(2, 65), *range(68, 129, 4), 160, 192, 256, 512, 1024)
"""The orders that are tried. More orders could lower epsilon, but only by a few percent."""


class SampleSteps(NamedTuple):
    """`steps` training steps, each with this sampling probability and noise multiplier."""

    probability: float
    noise_multiplier: float
    steps: int


def sampling_probability(samples: int, batch_size: int) -> float:
    """The probability that a sample is in a batch, for a device with `samples` samples."""
    return min(1.0, batch_size / samples)


def epsilon_of(spent: Iterable[SampleSteps], delta: float) -> float:
    """The total epsilon of the steps `spent`, for two data sets that differ by one added sample.

    Examples:
        >>> round(epsilon_of([SampleSteps(0.01, 1.0, 1000)], 1e-5), 2)
        2.11
    """
    orders = np.array(ORDERS, np.float64)
    total = np.zeros(len(orders))
    for part in spent:
        total += part.steps * np.array([_divergence(part, order) for order in ORDERS])
    found = total + np.log1p(-1 / orders) - math.log(delta) / (orders - 1)
    found -= np.log(orders) / (orders - 1)
    return max(0.0, float(found.min())) if total.any() else 0.0


def _divergence(part: SampleSteps, order: int) -> float:
    """The Renyi divergence of one step."""
    q, z = part.probability, part.noise_multiplier
    if q == 1:
        return order / (2 * z**2)
    k = np.arange(order + 1)
    choose = np.array([math.lgamma(order + 1) - math.lgamma(i + 1) - math.lgamma(order - i + 1)
                       for i in range(order + 1)])  # fmt: skip
    terms = choose + (order - k) * math.log1p(-q) + k * math.log(q) + (k * k - k) / (2 * z**2)
    most = terms.max()
    return float(most + math.log(np.exp(terms - most).sum())) / (order - 1)
