"""The table [privacy] of the federation's file, and the keys that it excludes."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from device_agent.formats.protocol.secure_sums import (
    FEWEST,
    MOST_SAMPLES,
    SecureTerms,
    SumPrivacy,
)
from toolkit.aggregation.privacy.budget import PrivacyBudget, PrivacyPlan, noise_for
from toolkit.toml_files import Table

Above = Annotated[float, Field(ge=1e-6, le=1e6)]
SINGLE = {"bounds": False, "judge": False}
"""Keys of [aggregation] that secure sums set, because limits and the judge need single updates."""
AGGREGATION = {"weights": "uniform", "factors": "act", **SINGLE}
"""Keys of [aggregation] that differential privacy sets. The weight of a device must not depend on
its data, and limits and the judge would compare single updates without noise."""
OVER_SELECTION = 1.0
"""The value of `over_selection` with differential privacy. A round then waits for all devices that
it asks, so no device decides whether another device counts."""


class PrivacyTable(Table):
    """Differential privacy for devices, secure sums, or both.

    With differential privacy, the models tell little about a single device's data:

    - `clip`: the largest L2 norm of a device's change.
    - `clip_quantile`: `clip` follows this quantile of the norms from round to round.
    - `delta`: the delta of the guarantee; at most 1 / number of devices.
    - `epsilon`: the largest epsilon that all rounds together may spend.
    - `noise_multiplier`: the standard deviation of the noise in the sum of the changes, divided by
      `clip`. By default it is computed from `epsilon` and the number of rounds.

    With secure sums, the coordinator learns the sum of a group's updates, and no single update:

    - `secure_aggregation`: use secure sums.
    - `smallest_group`: a sum has the updates of at least this many devices.
    - `most_change`: the most by which a number of an update may change in a round; larger changes
      are clipped.
    - `most_samples`: a device with more samples counts as if it had this number.

    With both, the devices clip their changes and add the noise themselves, so the coordinator sees
    no sum without noise. `clip` takes the place of `most_change`, and all devices have the same
    weight.
    """

    clip: Above | None = None
    clip_quantile: Annotated[float | None, Field(gt=0, lt=1)] = None
    delta: Annotated[float | None, Field(ge=1e-15, lt=1)] = None
    epsilon: Above | None = None
    noise_multiplier: Above | None = None
    secure_aggregation: bool = False
    smallest_group: Annotated[int, Field(ge=FEWEST)] = 5
    most_change: Above = 8.0
    most_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 10_000

    @model_validator(mode="after")
    def _has_one_purpose(self) -> Self:
        for key in ("clip_quantile", "delta", "epsilon", "noise_multiplier"):
            if getattr(self, key) is not None and self.clip is None:
                raise ValueError(f"`{key}` needs `clip`; set that, too")
        if self.clip is None and not self.secure_aggregation:
            raise ValueError(
                "the table needs `clip`, for differential privacy, or secure_aggregation = true"
            )
        for key in ("clip_quantile", "most_change", "most_samples"):
            both = self.clip is not None and self.secure_aggregation
            if both and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"`{key}` cannot be combined with `clip` and secure_aggregation = true: "
                    f"remove `{key}`"
                )
        if self.clip is not None and self.delta is None:
            raise ValueError("`clip` needs `delta`, at most 1 / number of devices; set that, too")
        if self.clip is not None and self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("`clip` needs `epsilon` or `noise_multiplier`; set one of them, too")
        for key in ("smallest_group", "most_change", "most_samples"):
            if key in self.model_fields_set and not self.secure_aggregation:
                raise ValueError(f"`{key}` needs secure_aggregation = true; set that, too")
        return self

    def terms(self, plan: PrivacyPlan | None) -> SecureTerms:
        """The terms of secure sums, with the noise of `plan` if they have differential privacy."""
        private = None
        if plan is not None:
            noise = math.ceil(plan.noise_multiplier * 1e6) / 1e6  # as in the signed text
            private = SumPrivacy(clip=plan.clip, noise_multiplier=noise)
        return SecureTerms(
            fewest=self.smallest_group,
            most_change=self.most_change,
            most_samples=self.most_samples if private is None else 1,
            privacy=private,
        )

    def plan(self, probability: float, rounds: int | None) -> PrivacyPlan:
        """The differential privacy of rounds that ask each device with this probability.

        `rounds` is the number of rounds. It is None only if the file has a noise multiplier. To
        find the noise multiplier takes seconds.

        Raises InputError if no noise is enough for the budget, or `dp-accounting` is missing.
        """
        assert self.clip is not None
        assert self.delta is not None
        noise = self.noise_multiplier
        if noise is None:
            assert self.epsilon is not None
            assert rounds is not None
            noise = noise_for(self.epsilon, self.delta, probability, rounds)
        budget = PrivacyBudget(self.delta, self.epsilon)
        return PrivacyPlan(self.clip, noise, budget, self.clip_quantile)


def with_privacy(given: Any) -> Any:
    """The content of the file, with the keys that its table [privacy] sets.

    Raises ValueError if one of these keys has another value in the file.
    """
    if not isinstance(given, Mapping) or given.get("privacy") is None:
        return given
    aggregation = given.get("aggregation", {})
    if not isinstance(aggregation, Mapping):
        return given  # refused later, because it is not a table
    table = given["privacy"]
    private = not isinstance(table, Mapping) or table.get("clip") is not None
    sets = AGGREGATION if private else SINGLE
    for key, value in sets.items():
        if aggregation.get(key, value) != value:
            raise ValueError(
                f"[privacy] sets {key} = {_toml(value)} itself, and [aggregation] has another "
                f"value: remove `{key}` from [aggregation]"
            )
    selects = _over_selection(given) if private else {}
    return {**given, **selects, "aggregation": {**aggregation, **sets}}


def _over_selection(given: Mapping[str, Any]) -> dict[str, float]:
    if given.get("over_selection", OVER_SELECTION) != OVER_SELECTION:
        raise ValueError(
            "[privacy] sets over_selection = 1.0 itself, because a round waits for all devices "
            "that it asks: remove `over_selection`"
        )
    return {} if given.get("clients_per_round") is None else {"over_selection": OVER_SELECTION}


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
