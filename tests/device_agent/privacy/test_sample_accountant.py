"""Epsilon of a device's samples against dp-accounting."""

import dp_accounting
import pytest
from dp_accounting import rdp

from device_agent.privacy.sample_accountant import (
    ORDERS,
    SampleSteps,
    epsilon_of,
    sampling_probability,
)

SETTINGS = {
    # Abadi et al. 2016, section 5.1: 100 epochs of lots of 1%, sigma = 4; later bounds are tighter.
    "Abadi et al. 2016": ([SampleSteps(0.01, 4.0, 10_000)], 1e-5, 1.26),
    # TensorFlow Privacy, `compute_dp_sgd_privacy`: 60 epochs of MNIST with batches of 256.
    "compute_dp_sgd_privacy": ([SampleSteps(256 / 60_000, 1.12, 14_063)], 1e-5, 2.92),
    "all samples in each step": ([SampleSteps(1.0, 2.0, 30)], 1e-5, None),
    "several rounds": ([SampleSteps(0.5, 1.0, 20), SampleSteps(0.1, 2.0, 100)], 1e-3, None),
    "little noise": ([SampleSteps(0.32, 0.5, 7)], 1e-5, None),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_epsilon_equals_that_of_dp_accounting(name: str) -> None:
    spent, delta, published = SETTINGS[name]
    found = epsilon_of(spent, delta)
    own, usual = rdp.RdpAccountant([float(order) for order in ORDERS]), rdp.RdpAccountant()
    for accountant in (own, usual):
        for probability, noise, steps in spent:
            event = dp_accounting.GaussianDpEvent(noise)
            if probability < 1:
                event = dp_accounting.PoissonSampledDpEvent(probability, event)
            accountant.compose(event, steps)
    assert found == pytest.approx(own.get_epsilon(delta), rel=1e-9)
    # Its usual orders are not only whole numbers, which helps a little.
    assert usual.get_epsilon(delta) <= found * (1 + 1e-9) <= 1.03 * usual.get_epsilon(delta)
    assert published is None or found < published


def test_nothing_is_spent_without_steps() -> None:
    assert epsilon_of([], 1e-5) == epsilon_of([SampleSteps(0.1, 1.0, 0)], 1e-5) == 0.0


def test_devices_with_few_samples_use_all_of_them() -> None:
    assert [sampling_probability(samples, 8) for samples in (4, 8, 32)] == [1.0, 1.0, 0.25]
