"""The weights of updates, and how far the global model moves to the mean of the updates."""

import hashlib
import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from profiles.errors import InputError

Weights = Literal["samples", "uniform", "softmax"]
Factors = Literal["afm", "act"]
Rule = Literal["mean", "trimmed", "median", "krum", "fltrust"]
ServerOptimizer = Literal["fedavgm", "fedadam", "fedyogi"]

LOWEST_TEMPERATURE = 0.05
"""At this temperature a full model outweighs one of rank ratio 1/2 by e^10. Far below this
temperature, the float32 weights of weak devices become 0. Then tensors that only weak devices
trained are lost."""

SERVER_RATES: dict[ServerOptimizer, float] = {"fedavgm": 1.0, "fedadam": 0.01, "fedyogi": 0.01}
"""The defaults of `server_rate`."""

GREATEST_BETA = 10.0
"""The largest `beta`, far above TDPFed's 1.8. The bound keeps the new model within float32."""


@dataclass(frozen=True)
class AggregationPolicy:
    """How the updates of one round are aggregated.

    The default is a mean weighted by samples. For a rule that no policy describes, write a function
    and give it to `aggregate` or `Federation` as `strategy`.

    Args:
        weights: The weight of an update. `samples`: the number of its samples. `uniform`: the same
            weight for all updates. `softmax`: FedHM eq. 2 over the submodels' strengths.
        temperature: The temperature of the softmax, from 0.05; inf means uniform weights.
        factors: How the updates of families that keep factors are averaged. `afm` averages the
            factors, then composes the tensor. `act` composes the tensor of every update, then
            averages these tensors.
        beta: The new model is (1 - beta) * old + beta * mean, as in TDPFed. With beta above 1, the
            model moves beyond the mean.
        rule: `mean` is the weighted mean. The other rules limit what hostile devices can do. They
            do not use `weights`, and need all updates of a round together. `trimmed` leaves out the
            lowest and highest 30% of the values of each element. `median` takes the middle value.
            `krum` leaves out the updates whose parameters differ most from other updates. `fltrust`
            weighs each update by its agreement with a training on held-out samples.
        server_optimizer: `fedavgm`, `fedadam` or `fedyogi`. The optimizer uses the change of a
            round as a gradient, and keeps moments from round to round; see `server_optimizers.py`.
            With None, the model moves by the change itself.
        server_rate: The learning rate of the server optimizer. None means 1 with `fedavgm` and 0.01
            with the other optimizers.
        server_momentum: The decay of the first moment.
        server_beta2: The decay of the second moment; not used by `fedavgm`.
        server_tau: Added to the root of the second moment; not used by `fedavgm`. With a small
            value, the steps of all elements have similar sizes.
        bounds: Whether `serve`, `simulate` and `aggregate_files` limit each update to a multiple of
            the usual size of updates; see `update_limits.py`.
        judge: Whether `serve` and `simulate` leave out updates that make the new model worse on
            held-out samples; see `model_judge.py`.

    Raises:
        InputError: If a value cannot be used.

    Examples:
        >>> AggregationPolicy(weights="uniform").weight(samples=100, strength=0.5)
        1.0
    """

    weights: Weights = "samples"
    temperature: float = 5.0
    factors: Factors = "afm"
    beta: float = 1.0
    rule: Rule = "mean"
    server_optimizer: ServerOptimizer | None = None
    server_rate: float | None = None
    server_momentum: float = 0.9
    server_beta2: float = 0.99
    server_tau: float = 1e-3
    bounds: bool = True
    judge: bool = True

    def __post_init__(self) -> None:
        for name, choices in (
            ("weights", get_args(Weights)),
            ("factors", get_args(Factors)),
            ("rule", get_args(Rule)),
            ("server_optimizer", (*get_args(ServerOptimizer), None)),
        ):
            if getattr(self, name) not in choices:
                raise InputError(
                    "{option} must be one of {choices}; it is {value!r}.",
                    code="aggregate.unknown-choice",
                    option=name,
                    choices=[choice for choice in choices if choice is not None],
                    value=getattr(self, name),
                )
        if not _number(self.temperature) >= LOWEST_TEMPERATURE:
            raise InputError(
                "temperature must be inf, or a number of at least {least}; it is {temperature!r}.",
                code="aggregate.bad-temperature",
                least=LOWEST_TEMPERATURE,
                temperature=self.temperature,
            )
        if not 0 < _number(self.beta) <= GREATEST_BETA:
            raise InputError(
                "beta must be a number above 0 and at most {most:g}; it is {beta!r}.",
                code="aggregate.bad-beta",
                most=GREATEST_BETA,
                beta=self.beta,
            )

        for name, least, most in (
            ("server_rate", 1e-6, 10.0),
            ("server_momentum", 0.0, 0.999),
            ("server_beta2", 0.0, 0.9999),
            ("server_tau", 1e-8, 1.0),
        ):
            value = getattr(self, name)
            if value is not None and not least <= _number(value) <= most:
                raise InputError(
                    "{option} must be a number from {least:g} to {most:g}; it is {value!r}.",
                    code="aggregate.bad-server-option",
                    option=name,
                    least=least,
                    most=most,
                    value=value,
                )

    @property
    def server_step(self) -> float:
        """The learning rate of the server optimizer."""
        assert self.server_optimizer is not None
        default = SERVER_RATES[self.server_optimizer]
        return default if self.server_rate is None else float(self.server_rate)

    def weight(self, samples: int, strength: float) -> float:
        """The weight of an update of `samples` samples, relative to other updates.

        `strength` is in (0, 1]. The softmax is FedHM eq. 2 with 1 subtracted from every strength.
        The subtraction does not change the ratios of the weights, but keeps every exponential at
        most 1.
        """
        match self.weights:
            case "samples":
                return float(samples)
            case "uniform":
                return 1.0
            case "softmax":
                return math.exp((strength - 1.0) / self.temperature)

    def fingerprint(self) -> str:
        """The SHA-256 of the policy. Only partial aggregates with the same policy can be merged."""
        numbers = float(self.temperature), float(self.beta)
        return hashlib.sha256(repr((self.weights, self.factors, *numbers)).encode()).hexdigest()


def _number(value: object) -> float:
    """`value` as a float; nan, which no range contains, if it is not a number or is too large."""
    try:
        return float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return math.nan
