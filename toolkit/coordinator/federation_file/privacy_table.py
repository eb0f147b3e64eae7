"""The table [privacy] of the federation's file, and the keys that do not go with it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from toolkit.toml_files import Table

Above = Annotated[float, Field(ge=1e-6, le=1e6)]
AGGREGATION = {"weights": "uniform", "factors": "act", "bounds": False, "judge": False}
"""Keys of [aggregation] that differential privacy sets. The weight of a device must not depend on
its data; limits and the judge compare single updates without noise."""


class PrivacyTable(Table):
    """Differential privacy for devices: the models tell little about a single device's data.

    - `clip`: the largest L2 norm of what a device changes.
    - `noise_multiplier`: the standard deviation of the noise in the sum of the changes, divided by
      `clip`.
    """

    clip: Above
    noise_multiplier: Above


def with_privacy(given: Any) -> Any:
    """The content of the file, with the keys that its table [privacy] sets.

    Raises ValueError if a key says something else.
    """
    if not isinstance(given, Mapping) or given.get("privacy") is None:
        return given
    aggregation = given.get("aggregation", {})
    if not isinstance(aggregation, Mapping):
        return given  # refused as no table
    for key, value in AGGREGATION.items():
        if aggregation.get(key, value) != value:
            raise ValueError(
                f"[privacy] needs {key} = {_toml(value)} in [aggregation], which it sets itself: "
                f"remove `{key}` from [aggregation]"
            )
    return {**given, "aggregation": {**aggregation, **AGGREGATION}}


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
