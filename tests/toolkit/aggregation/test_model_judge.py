"""The judge finds the updates without which a model is clearly better, in few aggregations."""

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.formats.protocol.fleet import Limited
from toolkit.aggregation.model_judge import (
    ERRORS,
    LEAST,
    PROGRESS,
    REST,
    TRIALS,
    Judged,
    counted_samples,
    harmful,
    is_better,
    judge_updates,
    standard_errors,
    suspects,
    too_far,
    with_part,
)

losses = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=2, max_size=30)


class Quality(NamedTuple):
    loss: float
    groups: np.ndarray | None
    accuracy: float | None = None


def of(values: np.ndarray, labels: int = 1) -> Quality:
    """A model with these mean losses of groups of `labels` samples."""
    counts = np.full(len(values), labels)
    return Quality(float(np.mean(values)), np.stack([values * labels, counts], 1))


def certain(loss: float) -> Quality:
    """A model whose losses do not vary."""
    return of(np.full(10, loss))


@given(losses, st.integers(1, 5))
def test_standard_errors_are_those_of_a_paired_test(
    pairs: list[tuple[float, float]], labels: int
) -> None:
    one, other = np.array(pairs).T
    differences = other - one
    z = standard_errors(of(one, labels), of(other, labels))
    assert z == pytest.approx(-standard_errors(of(other, labels), of(one, labels)))
    if differences.std() > 1e-6:
        error = differences.std(ddof=1) / math.sqrt(len(pairs))
        assert z == pytest.approx(differences.mean() / error, rel=1e-6, abs=1e-9)


def test_groups_count_by_their_labels(seed: int) -> None:
    """The deviation over many draws of the groups is the standard error."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 4, 4000)
    sums = np.array([draw.normal(0.1, 1, count).sum() for count in labels])
    one = Quality(0.0, np.stack([np.zeros(4000), labels], 1))
    other = Quality(0.1, np.stack([sums, labels], 1))
    mean = sums.sum() / labels.sum()
    error = 1 / math.sqrt(labels.sum())  # each label has the standard deviation 1
    assert standard_errors(one, other) == pytest.approx(mean / error, rel=0.1)


def test_unknown_losses_are_never_clearly_better() -> None:
    known, unknown = certain(0.1), Quality(9.0, None)
    for one, other in ((known, unknown), (unknown, known), (of(np.ones(1)), of(np.zeros(1)))):
        assert standard_errors(one, other) == 0
    assert standard_errors(known, known) == 0
    assert not is_better(known, unknown, 9.0)


def test_what_is_clearly_better() -> None:
    """From a loss of 2, the round reached 1.5: another 30% of 0.5 is needed."""
    whole = certain(1.5)
    assert is_better(certain(1.5 - 1.01 * PROGRESS * 0.5), whole, 2.0)
    assert not is_better(certain(1.5 - 0.99 * PROGRESS * 0.5), whole, 2.0)
    # The round made nothing better, or the loss worse.
    assert is_better(certain(2 - 1.01 * LEAST * 2), certain(2.0), 2.0)
    assert not is_better(certain(2 - 0.99 * LEAST * 2), certain(2.0), 2.0)
    assert not is_better(certain(2.9), certain(3.0), 2.0)
    assert is_better(certain(2.6), certain(3.0), 2.0)
    assert is_better(certain(9.0), Quality(math.nan, None), 2.0)
    assert not is_better(Quality(math.nan, None), Quality(math.inf, None), 2.0)
    spread = np.linspace(-1, 1, 50)
    error = spread.std(ddof=1) / math.sqrt(50)
    for factor, found in ((1.01, True), (0.99, False)):
        better = of(np.full(50, 2.0) - spread - factor * ERRORS * error)
        assert is_better(better, of(np.full(50, 2.0)), 2.0) is found


influences = st.dictionaries(st.text("abc", min_size=1), st.floats(-1, 1), max_size=20)


@given(influences, st.floats(1e-3, 1e3))
def test_who_is_suspected(values: dict[str, float], factor: float) -> None:
    found = suspects(values)
    assert len(found) <= 0.4 * len(values)
    assert all(values[key] > 0 for key in found)
    assert sorted((values[key] for key in found), reverse=True) == [values[key] for key in found]
    rest = max((values[key] for key in values.keys() - found), default=-1)
    assert all(values[key] >= rest for key in found)
    mean = sum(max(-value, 0) for value in values.values()) / max(len(values), 1)
    assert all(values[key] > 0.75 * mean for key in found)
    assert len(found) == int(0.4 * len(values)) or rest <= 0.75 * mean or len(values) < 3
    rounded = {key: round(value, 3) for key, value in values.items()}
    scaled = suspects({key: 2.0 ** round(factor) * value for key, value in rounded.items()})
    assert suspects(rounded) == scaled


def test_of_two_updates_none_is_suspected() -> None:
    assert suspects({"a": 1.0, "b": -1.0}) == []
    assert suspects({"a": 1.0, "b": -1.0, "c": -1.0}) == ["a"]
    assert suspects({"a": math.inf, "b": -1.0, "c": -1.0}) == ["a"]


class Rounds:
    """Each of the first `bad` of `count` suspected updates raises the loss from 1 by 1."""

    def __init__(self, count: int, bad: int) -> None:
        self.updates = [f"device-{n}" for n in range(count)]
        self.bad = {*self.updates[:bad]}
        self.calls = 0

    def without(self, out: Collection[str]) -> Judged:
        self.calls += 1
        return certain(1.0 + len(self.bad - {*out}) + 0.001 * len({*out} - self.bad))

    def found(self) -> list[str]:
        before, whole = certain(1.5), certain(1.0 + len(self.bad))
        return harmful(self.updates, before, whole, self.without)


@given(st.integers(0, 60), st.integers(0, 20))
def test_exactly_the_harmful_updates_are_found(count: int, bad: int) -> None:
    rounds = Rounds(count, min(bad, count))
    assert set(rounds.found()) == rounds.bad
    assert rounds.calls <= 2 * math.log2(max(count, 1)) + 2


def test_updates_that_are_harmful_only_together_are_found() -> None:
    def without(out: Collection[str]) -> Judged:
        return certain(0.5 if {"a", "b"} <= {*out} else 2.0)

    assert harmful(["a", "b", "c"], certain(1.0), certain(2.0), without) == ["a", "b"]


def test_each_result_is_clearly_better_than_the_whole_round() -> None:
    """Two updates together raise the loss enough, although neither does so alone."""
    losses = {0: 0.40, 1: 0.38, 2: 0.35}
    before, whole = certain(0.54), certain(losses[0])
    assert not is_better(certain(losses[1]), whole, before.loss)
    assert not is_better(certain(losses[2]), certain(losses[1]), before.loss)
    found = harmful(["a", "b"], before, whole, lambda out: certain(losses[len(out)]))
    assert found == ["a", "b"]


def test_an_unusable_model_is_not_better() -> None:
    def without(out: Collection[str]) -> Judged | None:
        return certain(0.5) if len(out) == 2 else None

    assert harmful(["a", "b", "c", "d"], certain(1.0), certain(2.0), without) == ["a", "b"]
    assert harmful(["a"], certain(1.0), certain(2.0), lambda out: None) == []


class Overshooting:
    """Honest updates lower the loss by a part of their weight, and raise it by all of it.

    Hostile updates raise it in both cases. The losses of samples vary a little.
    """

    def __init__(self, seed: int, updates: Collection[str], hostile: Collection[str]) -> None:
        self.updates, self.hostile = set(updates), set(hostile)
        self.draw, self.calls = np.random.default_rng(seed), 0

    def candidate(self, out: Collection[str], weakened: Collection[str]) -> Judged:
        self.calls += 1
        whole = self.updates - {*out} - {*weakened}
        bad = len(self.hostile.intersection(weakened))
        loss = 1 + len(whole) + 0.3 * bad - 0.1 * (len({*weakened}) - bad)
        return of(loss + self.draw.normal(0, 0.01, 50))


@pytest.mark.parametrize(("count", "hostile"), [(1, 0), (1, 1), (4, 2), (4, 0), (40, 0), (8, 8)])
def test_updates_that_only_go_too_far_stay(count: int, hostile: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    updates = [f"device-{n}" for n in range(count)]
    rounds = Overshooting(seed, updates, draw.choice(updates, hostile, replace=False))
    stay = too_far(updates, rounds.candidate([], []), rounds.candidate)
    assert set(stay) == rounds.updates - rounds.hostile
    assert rounds.calls <= 2 + TRIALS


def test_among_many_updates_only_some_trials_are_made(seed: int) -> None:
    updates = [f"device-{n}" for n in range(100)]
    rounds = Overshooting(seed, updates, updates[::2])
    whole = rounds.candidate([], [])
    assert set(too_far(updates, whole, rounds.candidate)) <= set(updates[1::2])
    assert rounds.calls <= 2 + TRIALS


def test_a_part_that_makes_the_model_clearly_worse_is_left_out() -> None:
    spread = np.linspace(-1, 1, 50)
    error = spread.std(ddof=1) / math.sqrt(50)
    best, whole = of(np.full(50, 2.0)), certain(9.0)

    def stay(part: Judged | None) -> bool:
        return too_far(["a"], whole, lambda out, weakened: part if weakened else best) == ["a"]

    for factor, expected in ((0.99, True), (1.01, False), (-9.0, True)):
        assert stay(of(np.full(50, 2.0) + spread + factor * ERRORS * error)) is expected
    for share, expected in ((0.99, True), (1.01, False)):  # of samples that differ much
        assert stay(of(2.0 + 99 * spread + share * REST * (9.0 - 2.0))) is expected
    for unusable in (None, Quality(math.nan, None), Quality(math.inf, np.full((9, 2), np.inf))):
        assert not stay(unusable)


def test_the_verdict_has_both() -> None:
    """Of three suspected updates, the first is hostile, the second goes too far."""

    def candidate(out: Collection[str], weakened: Collection[str]) -> Judged:
        hostile = 2.0 if "a" not in out and "a" not in weakened else 0.5 * ("a" in weakened)
        return certain(1 + hostile + ("b" not in out) * (-0.01 if "b" in weakened else 1))

    whole = candidate([], [])
    verdict = judge_updates(["a", "b", "c"], certain(1.5), whole, candidate)
    assert (verdict.left_out, verdict.weakened) == (["a"], ["b"])
    assert not any(judge_updates(["c"], certain(1.5), certain(1), lambda *which: certain(1)))


@given(st.integers(0, 10**12), st.none() | st.integers(1, 10**12))
def test_the_part_that_counts(samples: int, most: int | None) -> None:
    counted = counted_samples(samples, most)
    whole = samples if most is None else min(samples, most)
    assert counted == 1 or counted <= whole / 4 < counted + 1
    told = with_part(Limited(times=5.0, tensor="w", tensors=1), samples, counted)
    assert (told.samples, told.counted, told.is_far) == (samples, counted, True)
    assert told.text().endswith("count, because with all of them the model is worse")
    assert not with_part(None, samples, counted).is_far
