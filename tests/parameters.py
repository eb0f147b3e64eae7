"""Parameters of a test of which some run with `make test-long` only."""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

SEED, ALL = "EDGETAILOR_TEST_SEED", "EDGETAILOR_TEST_ALL"
"""Variables of the environment, which conftest.py sets: the seed, and whether this run tests all
that `half_of` can draw (`make test-long`)."""


def needs_litert(format: str) -> None:
    """Skip a test of TFLite where its packages are not installed."""
    if format == "tflite":
        pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")


def half_of(values: Iterable[Any]) -> list[Any]:
    """Half of `values`, drawn by the seed of this run. With `make test-long`, none of them.

    For tables of many cases that are alike: what changes all of them is seen in each run.
    """
    values = list(values)
    if ALL in os.environ:
        return []
    draw = np.random.default_rng(int(os.environ[SEED]))
    kept = draw.permutation(len(values))[: (len(values) + 1) // 2]
    return [values[number] for number in sorted(kept.tolist())]


def half_quick(values: Iterable[Any]) -> list[Any]:
    """`values`, of which all but a half, drawn by the seed of this run, are marked."""
    values = list(values)
    return some_quick(values, *half_of(value for value in values if not _is_marked(value)))


def quarter_quick(values: Iterable[Any]) -> list[Any]:
    """`values`, of which all but a quarter, drawn by the seed of this run, are marked."""
    return half_quick(half_quick(values))


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
    return [value if value in quick or _is_marked(value) else long_one(value) for value in values]


def without(values: Iterable[Any], *left_out: Any) -> list[Any]:
    """`values` but for those in `left_out`, which must be among them."""
    values = list(values)
    unknown = [value for value in left_out if value not in values]
    assert not unknown, unknown
    return [value for value in values if value not in left_out]


def _is_marked(value: Any) -> bool:
    return isinstance(value, type(pytest.param()))


def long_one(value: Any) -> Any:
    """`value` of one parametrized argument, or a tuple of values of several, marked `long`."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
