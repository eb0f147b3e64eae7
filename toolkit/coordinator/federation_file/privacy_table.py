"""The table [privacy] of the federation's file, and the keys that do not go with it."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from device_agent.formats.protocol.secure_sums import FEWEST, MOST_SAMPLES, SecureTerms
from toolkit.toml_files import Table

Above = Annotated[float, Field(ge=1e-6, le=1e6)]
SINGLE = {"bounds": False, "judge": False}
"""Keys of [aggregation] that secure sums set: limits and the judge compare single updates."""
AGGREGATION = {"weights": "uniform", "factors": "act", **SINGLE}
"""Keys of [aggregation] that differential privacy sets. The weight of a device must not depend on
its data; limits and the judge compare single updates without noise."""


class PrivacyTable(Table):
    """Differential privacy for devices, or secure sums.

    With differential privacy, the models tell little about a single device's data:

    - `clip`: the largest L2 norm of what a device changes.
    - `noise_multiplier`: the standard deviation of the noise in the sum of the changes, divided by
      `clip`.

    With secure sums, the coordinator learns the sum of a group's updates, and no single update:

    - `secure_aggregation`: use them.
    - `smallest_group`: a sum has the updates of at least so many devices.
    - `most_change`: no number of an update changes by more in a round; larger changes are clipped.
    - `most_samples`: a device with more samples counts like one with so many.
    """

    clip: Above = 0.0
    noise_multiplier: Above = 0.0
    secure_aggregation: bool = False
    smallest_group: Annotated[int, Field(ge=FEWEST)] = 5
    most_change: Above = 8.0
    most_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 10_000

    @model_validator(mode="after")
    def _has_one_purpose(self) -> Self:
        if bool(self.clip) != bool(self.noise_multiplier):
            raise ValueError("`clip` and `noise_multiplier` belong together: give both")
        if bool(self.clip) == self.secure_aggregation:
            raise ValueError(
                "the table needs either `clip` and `noise_multiplier`, or secure_aggregation = "
                "true; both together are not possible yet"
            )
        for key in ("smallest_group", "most_change", "most_samples"):
            if key in self.model_fields_set and not self.secure_aggregation:
                raise ValueError(f"`{key}` needs secure_aggregation = true; set that, too")
        return self

    @property
    def terms(self) -> SecureTerms | None:
        """The terms of secure sums; None without them."""
        if not self.secure_aggregation:
            return None
        return SecureTerms(
            fewest=self.smallest_group,
            most_change=self.most_change,
            most_samples=self.most_samples,
        )


def with_privacy(given: Any) -> Any:
    """The content of the file, with the keys that its table [privacy] sets.

    Raises ValueError if a key says something else.
    """
    if not isinstance(given, Mapping) or given.get("privacy") is None:
        return given
    aggregation = given.get("aggregation", {})
    if not isinstance(aggregation, Mapping):
        return given  # refused as no table
    table = given["privacy"]
    secure = isinstance(table, Mapping) and table.get("secure_aggregation") is True
    sets = SINGLE if secure else AGGREGATION
    for key, value in sets.items():
        if aggregation.get(key, value) != value:
            raise ValueError(
                f"[privacy] needs {key} = {_toml(value)} in [aggregation], which it sets itself: "
                f"remove `{key}` from [aggregation]"
            )
    return {**given, "aggregation": {**aggregation, **sets}}


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
