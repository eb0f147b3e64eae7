"""The table `hostile` in [simulation] of the federation's file: clients that attack the model."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from toolkit.toml_files import Table

AttackName: TypeAlias = Literal[
    "sign-flip", "scale", "reverse-scale", "noise", "samples", "label-flip", "little-is-enough",
    "inner-product", "backdoor", "copies", "drift", "statistics", "single-tensor", "zeros",
]  # fmt: skip
"""The attacks of hostile clients, see `toolkit/simulation/attacks/`."""


class HostileTable(Table):
    """Hostile clients: their `share` of all clients or their `count`, and their attack.

    Without `strength`, an attack has its own default.
    """

    attack: AttackName
    share: Annotated[float | None, Field(gt=0, lt=1)] = None
    count: Annotated[int | None, Field(ge=1)] = None
    strength: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None

    @model_validator(mode="after")
    def _number_is_given_once(self) -> Self:
        if (self.share is None) == (self.count is None):
            raise ValueError("give either `share` or `count`, which say how many are hostile")
        return self

    def clients(self, clients: int) -> int:
        """How many of all `clients` are hostile, at least one."""
        return self.count or max(1, round((self.share or 0) * clients))
