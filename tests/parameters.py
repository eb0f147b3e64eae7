"""Parameters of a test of which some run with `make test-long` only."""

from collections.abc import Iterable
from typing import Any

import pytest


def some_long(values: Iterable[Any], *long: Any) -> list[Any]:
    """`values`, of which those in `long` are marked; a tuple holds one value per argument."""
    values = list(values)
    unknown = [value for value in long if value not in values]
    assert not unknown, unknown
    return [long_one(value) if value in long else value for value in values]


def some_quick(values: Iterable[Any], *quick: Any) -> list[Any]:
    """`values`, of which all but those in `quick` are marked."""
    values = list(values)
    unknown = [value for value in quick if value not in values]
    assert not unknown, unknown
    return [value if value in quick else long_one(value) for value in values]


def without(values: Iterable[Any], *left_out: Any) -> list[Any]:
    """`values` but for those in `left_out`, which must be among them."""
    values = list(values)
    unknown = [value for value in left_out if value not in values]
    assert not unknown, unknown
    return [value for value in values if value not in left_out]


def long_one(value: Any) -> Any:
    """`value` of one parametrized argument, or a tuple of values of several, marked `long`."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
