"""The table [simulation] of the federation's file: the clients of `edgetailor simulate`."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from toolkit.coordinator.federation_file.hostile_table import HostileTable
from toolkit.toml_files import Table

ALPHA, SHARDS = 0.5, 2
"""Defaults of `alpha` and `shards`: FedHM's concentration, and FedAvg's shards for each client."""

Format: TypeAlias = Literal["cifar10", "cifar100", "leaf", "mnist", "tiny-imagenet"]
"""Public datasets that are read as they are distributed."""


class SimulationTable(Table):
    """How many clients there are, who takes part in a round, and which samples each client has.

    With a `format`, `data` is the folder of a public dataset. The test samples of this dataset
    evaluate the model. Without a `format`, the samples in `held_out` evaluate the model. Without
    `held_out`, the share `held_out_share` of the samples evaluates the model. `participation` is
    the share of the clients in each round. `alpha` is the concentration of the Dirichlet
    distribution. With `shards`, the samples are sorted by label, and each client gets this number
    of pieces.

    Each client of a round fails with the probability `failure_rate`: a failing client receives its
    submodel and sends nothing. A client is away for the share `away` of each day of `day_s`
    simulated seconds, at its own time of the day.

    With dynamic `capacities`, each client of a round gets the submodel of a random client. With
    `up-to-own`, each client gets a random submodel of the file that is no larger than its own. With
    a `baseline`, clients train alone, or one client has the samples of all clients. Each client
    keeps the share `validation` of its samples to evaluate its own model. Some clients may be
    `hostile`.
    """

    data: str
    format: Format | None = None
    clients: Annotated[int | None, Field(ge=1)] = None
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    partition: Literal["iid", "dirichlet", "shards", "writers"] = "iid"
    alpha: Annotated[float | None, Field(ge=0.001, le=1e6)] = None
    shards: Annotated[int | None, Field(ge=1)] = None
    capacities: Literal["fixed", "dynamic", "up-to-own"] = "fixed"
    baseline: Literal["local", "centralised"] | None = None
    failure_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    away: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    day_s: Annotated[float, Field(ge=1)] = 86400.0
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    seed: Annotated[int, Field(ge=0)] = 0
    hostile: HostileTable | None = None

    @property
    def is_local(self) -> bool:
        """Whether clients train alone."""
        return self.baseline == "local"

    @model_validator(mode="after")
    def _options_fit_the_partition(self) -> Self:
        for key, value, wanted in (
            ("alpha", self.alpha, "dirichlet"),
            ("shards", self.shards, "shards"),
        ):
            if value is not None and self.partition != wanted:
                raise ValueError(
                    f'`{key}` needs partition = "{wanted}"; partition is "{self.partition}"'
                )
        if self.hostile is not None and self.baseline is not None:
            raise ValueError(
                "`hostile` clients cannot be combined with a `baseline`, which averages no "
                "updates: remove one of them"
            )
        if self.partition == "writers" and self.format != "leaf":
            raise ValueError('partition = "writers" needs format = "leaf", which names the writers')
        return self
