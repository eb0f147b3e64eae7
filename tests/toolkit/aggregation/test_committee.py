"""The decision of a committee: a majority of votes, which a minority cannot change."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from device_agent.formats.evaluation_counts import EvaluationCounts
from toolkit.aggregation.committee import FEWEST, MARGIN, REJECTED, UNJUDGED, Committee, rise

LIES = (-1.0, 0.0, 1e30, float("inf"))


def committees(draw: np.random.Generator) -> Iterator[tuple[int, list[float]]]:
    """How many are asked, and some answers around the margin."""
    for _ in range(300):
        asked = int(draw.integers(0, 9))
        answers = MARGIN + draw.normal(size=draw.integers(0, asked + 1))
        yield asked, answers.tolist()


def test_a_minority_of_liars_decides_nothing(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(300):
        members = int(draw.integers(FEWEST, 12))
        liars = (members - 1) // 2
        lies = draw.choice(LIES, size=liars).tolist()
        for sign in (-1, 1):
            honest = MARGIN + sign * (1e-9 + draw.random(members - liars))
            votes = Committee(members, dict(enumerate([*lies, *honest.tolist()])))
            assert votes.accepts == (sign < 0)


def test_the_decision_is_that_of_counting_all_votes(seed: int) -> None:
    """An early decision is that of every way in which the other members may vote."""
    early = 0
    for asked, answers in committees(np.random.default_rng(seed)):
        votes = Committee(asked, dict(enumerate(answers)))
        against = sum(answer > MARGIN for answer in answers)
        assert votes.accepts == (len(answers) >= FEWEST and against < len(answers) / 2)
        missing = asked - len(answers)
        ends = {
            Committee(asked, dict(enumerate([*answers, *rest]))).accepts
            for rest in product((0.0, 1.0), repeat=missing)
        }
        if votes.is_decided:
            assert ends == {votes.accepts}
            early += missing > 0
        elif len(answers) >= FEWEST:
            assert len(ends) == 2, "the members that are missing cannot change it"
        expected = UNJUDGED if len(answers) < FEWEST else REJECTED
        assert votes.text().startswith(expected) == (not votes.accepts)
    assert early > 10


def counts(loss: float, labels: int = 10, samples: int = 10) -> EvaluationCounts:
    return EvaluationCounts(samples=samples, counted=labels, correct=0, loss_sum=loss)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (counts(10.0), counts(11.5), 0.15),
        (counts(10.0), counts(0.0), -1.0),
        (counts(-10.0), counts(-8.0), 0.2),  # a loss of the user's own may be below zero
        (counts(0.0), counts(0.0), 0.0),
        (counts(0.0), counts(1e-9), float("inf")),
        (counts(0.0), counts(-1.0), float("-inf")),
        (counts(3e30), counts(3e38), 1e8),
        (counts(10.0), counts(float("nan")), float("inf")),
        (counts(10.0), counts(float("-inf")), float("inf")),
        (counts(10.0), counts(10.0, labels=9), None),
        (counts(10.0), counts(10.0, samples=11), None),
        (counts(0.0, labels=0), counts(0.0, labels=0), None),
    ],
)
def test_the_rise_of_a_loss(
    before: EvaluationCounts, after: EvaluationCounts, expected: float | None
) -> None:
    assert rise(before, after) == (expected if expected is None else pytest.approx(expected))


def test_a_rise_without_end_is_told_in_few_characters() -> None:
    for rises in ([0.0, 3e37, 3e38], [0.0, float("inf"), float("inf")]):
        text = Committee(3, dict(enumerate(rises))).text()
        assert text.endswith("of 2 of 3 devices by more than 10% (median above 1000%)")
