"""The keys of the federation's file about its rounds: who is asked, and when a round closes."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from toolkit.coordinator.federation_file.value_types import (
    NumberOrShare,
    Positive,
    Selection,
    Span,
    whole_or,
)
from toolkit.toml_files import Table

MAX_STALENESS, MOST_STALENESS = 10, 100
"""The default and the largest value of `max_staleness`. The models of this many rounds are kept."""
MOST_KEPT_UPDATES = 3
"""The highest `keep_updates`: older rounds have no records of their updates."""
ENDLESS = "endless"
"""The value of `rounds` if there is no last round."""


class RoundKeys(Table):
    """When a round opens and closes, which devices it asks, and which of its files are kept.

    - `rounds`: ENDLESS if there is no last round.
    - `early_stopping`: the rounds end when the models have not improved for this many rounds.
    - `deadline_s`: seconds that a round may last.
    - `budget_s`: seconds that a device may compute in a round.
    - `keep`: which rounds' models stay in the state folder.
    - `keep_updates`: how many of the last rounds keep the tensors of their updates.
    - `min_devices`: the first round opens when this many devices have joined.
    - `quorum`: a round closes early when this many updates have come.
    - `min_updates`: a round never closes with fewer updates.
    - `mode`: in asynchronous rounds, an update counts in the round in which it comes. Its weight
      falls with the number of rounds that have closed since its model.
    - `buffer_size`: an asynchronous round closes when this many updates have come.
    - `max_staleness`: updates of a model that is older than this many rounds are refused.
    - `clients_per_round`: a round closes with this number of updates, or this share of the members.
    - `over_selection`: the number of asked devices, divided by the number of wanted updates.
    - `selection`: the policy that selects the asked devices.
    - `forget_after`: a device that was not seen for this many seconds loses its membership.
    """

    rounds: Annotated[int | Literal["endless"], whole_or(ENDLESS)]
    early_stopping: Positive | None = None
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    budget_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    min_devices: Positive | None = None
    quorum: Positive | None = None
    min_updates: Positive | None = None
    mode: Literal["sync", "async"] = "sync"
    buffer_size: Positive | None = None
    max_staleness: Annotated[int, Field(ge=0, le=MOST_STALENESS)] | None = None
    clients_per_round: NumberOrShare | None = None
    over_selection: Annotated[float, Field(ge=1, le=10)] = 1.3
    selection: Selection = "uniform"
    forget_after: Span | None = None
    keep: Annotated[int | Literal["all", "best"], whole_or("all", "best")] = 10
    keep_updates: Annotated[int, Field(ge=0, le=MOST_KEPT_UPDATES)] = 0

    @model_validator(mode="after")
    def _quorum_is_enough(self) -> Self:
        if self.quorum is not None and self.quorum < (self.min_updates or 0):
            raise ValueError(
                f"`quorum` is {self.quorum}, but a round needs `min_updates` = "
                f"{self.min_updates} updates to close: raise `quorum`, or lower `min_updates`"
            )
        return self

    @model_validator(mode="after")
    def _mode_has_its_keys(self) -> Self:
        if self.mode == "sync":
            for key in ("buffer_size", "max_staleness"):
                if getattr(self, key) is not None:
                    raise ValueError(f'`{key}` needs mode = "async": set `mode`, or remove `{key}`')
            return self
        if self.buffer_size is None:
            raise ValueError('mode = "async" needs `buffer_size`: the updates that make a round')
        if self.quorum is not None:
            raise ValueError('with mode = "async", `buffer_size` is the quorum: remove `quorum`')
        if self.buffer_size < (self.min_updates or 0):
            raise ValueError(
                f"`buffer_size` is {self.buffer_size}, but a round needs `min_updates` = "
                f"{self.min_updates} updates: raise `buffer_size`, or lower `min_updates`"
            )
        if self.clients_per_round is not None:
            raise ValueError(
                '`clients_per_round` needs mode = "sync". In asynchronous rounds all devices '
                "train; in `simulate`, `participation` says how many clients train at a time"
            )
        return self

    @model_validator(mode="after")
    def _budget_ends_in_time(self) -> Self:
        if self.budget_s is not None and self.budget_s >= self.deadline_s:
            raise ValueError(
                f"`budget_s` is {self.budget_s:g}, but a round lasts `deadline_s` = "
                f"{self.deadline_s:g} seconds at most: lower `budget_s`, or raise `deadline_s`"
            )
        return self

    @model_validator(mode="after")
    def _selection_is_whole(self) -> Self:
        number = self.clients_per_round
        if number is None:
            for key in ("selection", "over_selection"):
                if key in self.model_fields_set:
                    raise ValueError(f"`{key}` needs `clients_per_round`; set that, too")
        elif self.quorum is not None:
            raise ValueError(
                "`quorum` and `clients_per_round` both say how many updates close a round: remove "
                "`quorum`"
            )
        elif isinstance(number, int) and number < (self.min_updates or 0):
            raise ValueError(
                f"`clients_per_round` is {number}, but a round needs `min_updates` = "
                f"{self.min_updates} updates to close: raise `clients_per_round`, or lower "
                "`min_updates`"
            )
        return self

    def updates_wanted(self, members: int) -> int | None:
        """How many updates close a round of a federation with `members` devices.

        None if a round asks all devices, and waits for all of them or for `quorum`.

        Examples:
            >>> RoundKeys.model_construct(clients_per_round=0.1).updates_wanted(250)
            25
        """
        number = self.clients_per_round
        if number is None:
            return None
        wanted = number if isinstance(number, int) else max(1, round(number * members))
        return max(wanted, self.min_updates or 1)

    def devices_asked(self, wanted: int) -> int:
        """How many devices a round asks to get `wanted` updates: `over_selection` times as many.

        Examples:
            >>> RoundKeys.model_construct(over_selection=1.3).devices_asked(200)
            260
        """
        return math.ceil(round(self.over_selection * wanted, 6))

    @property
    def closing_updates(self) -> int | None:
        """How many updates close a round early; None if a round waits for all its devices."""
        return self.buffer_size if self.mode == "async" else self.quorum

    @property
    def oldest(self) -> int:
        """How many rounds old the model of an update may be, in asynchronous rounds."""
        return MAX_STALENESS if self.max_staleness is None else self.max_staleness

    @property
    def kept_models(self) -> int | Literal["all", "best"]:
        """`keep`, but at least the models that updates of the last and the open round need."""
        if self.mode == "sync" or self.keep == "all":
            return self.keep
        return max(self.oldest + 2, 1 if self.keep == "best" else self.keep)

    @property
    def last_round(self) -> int | None:
        """The number of the last round; None if there is none."""
        return self.rounds if isinstance(self.rounds, int) else None
