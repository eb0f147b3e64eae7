"""The table [sweep] of the federation's file: values that `edgetailor simulate` tries for keys."""

from collections.abc import Iterator, Mapping
from typing import Any


def grid_of_table(table: Mapping[str, Any]) -> dict[str, list[object]]:
    """The values to try by key, such as `training.learning_rate`.

    Raises ValueError if a value is not a list of values, or if a key comes twice.

    Examples:
        >>> grid_of_table({"training": {"epochs": [1, 2]}, "quorum": [3]})
        {'training.epochs': [1, 2], 'quorum': [3]}
    """
    grid: dict[str, list[object]] = {}
    for key, values in _leaves(table, ""):
        if key in grid:
            raise ValueError(f"[sweep] has `{key}` twice: write all its values in one list")
        if not isinstance(values, list) or not values:
            raise ValueError(
                f"`{key}` of [sweep] is {values!r}; it must be a list of the values to try, for "
                "example [0.05, 0.1]"
            )
        grid[key] = [value for n, value in enumerate(values) if value not in values[:n]]
    return grid


def check_sweep(table: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `table` if `grid_of_table` can read it. Raises ValueError otherwise."""
    grid_of_table(table or {})
    return table


def _leaves(table: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """The values in `table` and in its nested tables, with their full keys."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
