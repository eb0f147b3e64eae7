"""Draws from gamma, beta and Dirichlet distributions, from a fixed number of uniform numbers.

The method is that of Marsaglia and Tsang, "A Simple Method for Generating Gamma Variables" (2000),
https://doi.org/10.1145/358407.358414. A candidate is d (1 + c x)^3 with normal numbers x, and is
accepted in at least 95 of 100 cases. A training step cannot loop until one is accepted. So it makes
TRIES candidates, and takes the first accepted one.
"""

from typing import Any

import torch
from torch import Tensor

from exporters.programs import source_lines
from exporters.recording.replacements.uniform_numbers import standard_normal, uniform
from exporters.recurrence.replacements import Replacement
from profiles.errors import ModelError

TRIES = 4
"""All of them fail in fewer than one of 100,000 cases. Then the draw is the mode."""


def log_gamma_draws(concentration: Tensor) -> Tensor:
    """The logarithms of draws from gamma distributions of scale 1, in the shape of their parameter.

    A draw for a is a draw for a + 1 times U^(1 / a). In logarithms, no draw becomes zero, even for
    a small parameter.

    Raises:
        ModelError: The model wants the gradient of the parameter.
    """
    if torch.is_grad_enabled() and concentration.requires_grad:
        line = source_lines.running_line()
        raise ModelError(
            "The model draws from a beta, gamma or Dirichlet distribution by rsample{place}, and "
            "no graph can express the gradient of this draw. Call sample() instead.",
            code="model.random-numbers",
            place=source_lines.parenthesized(line),
            line=line,
        )
    a = concentration.detach()
    d = a + 2 / 3
    log_scale = torch.zeros_like(d)
    accepted = torch.zeros_like(d, dtype=torch.bool)
    for _ in range(TRIES):
        x = standard_normal(a.shape)
        v = (1 + x / (9 * d).sqrt()).clamp(min=1e-6) ** 3
        fits = uniform(a.shape).log() < x * x / 2 + d - d * v + d * v.log()
        log_scale = torch.where(fits & ~accepted, v.log(), log_scale)
        accepted = accepted | fits
    return d.log() + log_scale + uniform(a.shape).log() / a


def standard_gamma(_: Any, concentration: Tensor, *__: Any, **___: Any) -> Tensor:
    """`torch._standard_gamma`, which `torch.distributions.Gamma` calls."""
    return log_gamma_draws(concentration).exp()


def dirichlet(_: Any, concentration: Tensor, *__: Any, **___: Any) -> Tensor:
    """`torch._sample_dirichlet`, which the distributions `Beta` and `Dirichlet` call."""
    return log_gamma_draws(concentration).softmax(-1)


def beta(a: Any, b: Any) -> Tensor:
    """`np.random.beta(a, b)` and `random.betavariate(a, b)`."""
    return log_gamma_draws(torch.tensor([float(a), float(b)])).softmax(0)[0]


def gamma(shape: Any, scale: Any = 1.0) -> Tensor:
    """`np.random.gamma(shape, scale)` and `random.gammavariate(shape, scale)`."""
    drawn: Tensor = log_gamma_draws(torch.tensor(float(shape))).exp() * scale
    return drawn


GAMMA_DRAWS: dict[Any, Replacement] = {
    torch._standard_gamma: standard_gamma,
    torch._sample_dirichlet: dirichlet,
}
"""Functions of torch that draw from gamma and Dirichlet distributions."""
