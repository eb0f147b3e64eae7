"""How updates are weighed and how far the global model follows their mean."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from profiles.errors import InputError

Weights = Literal["samples", "uniform", "softmax"]
Factors = Literal["afm", "act"]

LOWEST_TEMPERATURE = 0.05
"""At it a full model already outweighs one of rank ratio 1/2 by e^10; far below, float32 weights
of weak devices vanish, and with them tensors that only these trained."""

GREATEST_BETA = 10.0
"""Far beyond TDPFed's 1.8; keeps the new model within float32."""


@dataclass(frozen=True)
class AggregationPolicy:
    """What `aggregate` does with the updates of one round.

    `weights` is what an update counts: its number of samples, the same for all, or FedHM eq. 2's
    softmax over strengths at `temperature` (inf: the same for all). `factors` says how families
    that keep factors are averaged: `afm` averages factors and composes once, `act` composes every
    update. `beta` is TDPFed's: the new model is (1 - beta) * old + beta * mean; above 1 it goes
    beyond the mean. Raises InputError for values outside what aggregation can use.
    """

    weights: Weights = "samples"
    temperature: float = 5.0
    factors: Factors = "afm"
    beta: float = 1.0

    def __post_init__(self) -> None:
        for name, choices in (("weights", get_args(Weights)), ("factors", get_args(Factors))):
            if getattr(self, name) not in choices:
                raise InputError(
                    f"{name} must be one of {', '.join(choices)}; it is {getattr(self, name)!r}."
                )
        if not _number(self.temperature) >= LOWEST_TEMPERATURE:
            raise InputError(
                f"temperature must be a number from {LOWEST_TEMPERATURE} up, or inf; "
                f"it is {self.temperature!r}."
            )
        if not 0 < _number(self.beta) <= GREATEST_BETA:
            raise InputError(
                f"beta must be a number above 0 and at most {GREATEST_BETA:g}; it is {self.beta!r}."
            )

    def weight(self, samples: int, strength: float) -> float:
        """Weight of an update, to be divided by the sum over all; `strength` is in (0, 1].

        FedHM eq. 2 with 1 subtracted from every strength, which cancels in the quotient and keeps
        the exponential at most 1.
        """
        match self.weights:
            case "samples":
                return float(samples)
            case "uniform":
                return 1.0
            case "softmax":
                return math.exp((strength - 1.0) / self.temperature)


def _number(value: object) -> float:
    """`value` as a float; nan, which is in no range, where it is no number or beyond any float."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.nan
