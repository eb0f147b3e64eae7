"""How devices train: the hyper-parameters that are the same for all families."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from device_agent.formats.manifest import Dtype
from profiles.errors import InputError

Loss = Literal["cross-entropy", "binary-cross-entropy", "mse"]
Optimizer = Literal["sgd", "nesterov", "adam", "adamw"]

MOST = 2**31 - 1
"""Samples of a batch, and passes over the data: what every runtime can count."""

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest float32."""


@dataclass(frozen=True)
class TrainingConfig:
    """Local training of one round: `epochs` passes in batches of `batch_size`.

    The `loss` is cross-entropy (binary where the model has one output), or the mean squared error
    of a regression. `momentum` is SGD's and Nesterov's; `weight_decay` is added to the gradient,
    with `adamw` taken off the parameters instead. `proximal` is FedProx's mu: it holds devices near
    the parameters that they received. Families with a personal model hold that by their own
    `penalty` instead, and take Nesterov's steps for `sgd` too, as their papers do.

    Learning rates shrink from round to round by the factor `round_decay`. Statistics of batch norms
    are averaged over the devices (`global`), or neither tracked nor sent by them (`static`): the
    server then takes them from its held-out samples. With `masked` a device's loss leaves out the
    classes that it has no samples of. Raises InputError for values outside what training can use.
    """

    batch_size: int = 32
    epochs: int = 1
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    round_decay: float = 1.0
    batch_norm: Literal["global", "static"] = "global"
    masked: bool = False
    loss: Loss = "cross-entropy"
    optimizer: Optimizer = "sgd"
    proximal: float = 0.0

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 2), ("epochs", 1)):
            value = getattr(self, name)
            if value < low:
                raise InputError(f"{name} must be at least {low}; it is {value}.")
            if value > MOST:
                raise InputError(f"{name} must be at most {MOST:,}; it is {value}.")
        for name in ("learning_rate", "momentum", "weight_decay", "proximal"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} must be a number from 0 up; it is {value}.")
            if value > LARGEST:
                raise InputError(
                    f"{name} must be at most {LARGEST:g}, the largest float32; it is {value}."
                )
        if self.batch_norm not in ("global", "static"):
            raise InputError(f'batch_norm must be "global" or "static"; it is {self.batch_norm!r}.')
        for name, known in (("loss", get_args(Loss)), ("optimizer", get_args(Optimizer))):
            value = getattr(self, name)
            if value not in known:
                names = ", ".join(f'"{one}"' for one in known)
                raise InputError(f"{name} must be one of {names}; it is {value!r}.")
        if self.momentum >= 1:
            raise InputError(f"momentum must be below 1; it is {self.momentum}.")
        if self.optimizer == "nesterov" and self.momentum == 0:
            raise InputError(
                'optimizer "nesterov" needs a momentum above 0; it is 0. Take optimizer "sgd".'
            )
        if self.masked and self.loss == "mse":
            raise InputError('masked leaves out classes, and the loss "mse" has none: drop one.')
        if not 0 < self.round_decay <= 1:
            raise InputError(
                f"round_decay must be above 0 and at most 1; it is {self.round_decay}."
            )

    @property
    def labels(self) -> Dtype:
        """The labels' type: int64 for classes, float32 for the numbers of a regression."""
        return "float32" if self.loss == "mse" else "int64"
