"""What the bounds promise, whatever hostile updates hold: a majority is never left out."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.aggregation.limits.update_bounds import (
    LIMIT,
    LOOSE,
    Scale,
    Scales,
    excesses,
    most_samples,
)

numbers = st.floats(0, 1e38)
hostile = st.one_of(numbers, st.just(math.inf))


def left_out(round_: dict[str, Scales]) -> list[str]:
    return [device for device, excess in excesses(round_).items() if excess.times > LIMIT]


@given(
    received=numbers,
    factors=st.lists(st.floats(0.01, 1), min_size=1, max_size=6),
    attacks=st.lists(hostile, max_size=5),
)
def test_a_majority_within_the_limit_stays(
    received: float, factors: list[float], attacks: list[float]
) -> None:
    """Honest updates whose numbers differ up to a hundredfold, and fewer hostile ones."""
    attacks = attacks[: len(factors) - 1]
    honest = {f"h{n}": {"w": Scale(received * f, received)} for n, f in enumerate(factors)}
    bad = {f"b{n}": {"w": Scale(value, received)} for n, value in enumerate(attacks)}
    assert not set(left_out(honest | bad)) & honest.keys()


@given(scale=st.floats(1, 1e30), times=st.floats(301, 1e6), honest=st.integers(1, 9))
def test_one_beyond_the_limit_is_left_out_and_named(
    scale: float, times: float, honest: int
) -> None:
    round_: dict[str, Scales] = {f"h{n}": {"w": Scale(scale, 0.5)} for n in range(honest)}
    round_["bad"] = {"v": Scale(1, 1), "w": Scale(scale * times, 0.5)}
    found = excesses(round_)["bad"]
    assert (found.tensor, left_out(round_)) == ("w", ["bad"])
    assert found.times == pytest.approx(times)
    assert str(found).startswith("'w' contains numbers up to ")


def test_what_only_one_device_holds_may_have_the_scale_of_its_data() -> None:
    lone = {"a": {"s": Scale(1e7, 1, loose=True)}, "b": {"w": Scale(1, 1)}}
    assert left_out(lone) == []
    assert left_out({"a": {"s": Scale(1e9, 1, loose=True)}, "b": {"w": Scale(1, 1)}}) == ["a"]
    assert left_out({"a": {"s": Scale(1e7, 1)}, "b": {"w": Scale(1, 1)}}) == ["a"]
    # In a round of one update everything is held once.
    assert excesses({"a": {"w": Scale(1e7, 0)}})["a"].times == 1e7 / LOOSE


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=9))
def test_claims_within_the_limit_count_in_full(claims: list[int]) -> None:
    most = most_samples(claims)
    assert most >= min(claims) * LIMIT
    assert most <= LIMIT * np.median(claims) * (1 + 1e-9)


@given(honest=st.lists(st.integers(1, 10**4), min_size=1, max_size=9), claim=st.integers(1, 10**12))
def test_one_claim_beside_others_is_bounded_by_theirs(honest: list[int], claim: int) -> None:
    assert most_samples([*honest, claim]) <= LIMIT * max(honest)


def test_updates_that_overflow_together_hide_none_of_them() -> None:
    both = {name: {"w": Scale(math.inf, 1.0)} for name in ("a", "b")}
    assert left_out({**both, "c": {"w": Scale(1.0, 1.0)}}) == ["a", "b"]
