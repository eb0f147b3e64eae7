"""How devices train: the hyper-parameters that are the same for all families."""

import math
from dataclasses import dataclass
from typing import Literal

from profiles.errors import InputError


@dataclass(frozen=True)
class TrainingConfig:
    """Local training of one round: `epochs` passes in batches of `batch_size`, SGD.

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

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 2), ("epochs", 1)):
            if getattr(self, name) < low:
                raise InputError(f"{name} must be at least {low}; it is {getattr(self, name)}.")
        for name in ("learning_rate", "momentum", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} must be a number from 0 up; it is {value}.")
        if self.batch_norm not in ("global", "static"):
            raise InputError(f'batch_norm must be "global" or "static"; it is {self.batch_norm!r}.')
        if self.momentum >= 1:
            raise InputError(f"momentum must be below 1; it is {self.momentum}.")
        if not 0 < self.round_decay <= 1:
            raise InputError(
                f"round_decay must be above 0 and at most 1; it is {self.round_decay}."
            )
