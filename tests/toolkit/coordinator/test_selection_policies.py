"""The policies that select the devices of a round, against counts and exact probabilities."""

import itertools
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import chisquare

from refusals import refused
from toolkit.coordinator.federation_file.value_types import SELECTIONS
from toolkit.coordinator.rounds.selection_policies import POLICIES, Candidate, selected

DRAWS = 4000
RARE = 1e-6
"""The probability that an honest draw fails a chi-square test."""


def candidates(samples: list[int | None]) -> list[Candidate]:
    return [Candidate(f"phone-{n}", "phone", count, 0) for n, count in enumerate(samples)]


def drawn(
    selection: str, seed: int, known: list[Candidate], count: int
) -> Counter[tuple[int, ...]]:
    """How often each set of positions was selected."""
    draws = (np.random.default_rng([seed, n]) for n in range(DRAWS))
    return Counter(tuple(selected(selection, draw, known, count)) for draw in draws)


def successive(weights: list[float], chosen: tuple[int, ...]) -> float:
    """The probability of a set if one after another is drawn by weight, over all orders."""
    probability = 0.0
    for order in itertools.permutations(chosen):
        left, product = sum(weights), 1.0
        for position in order:
            product *= weights[position] / left
            left -= weights[position]
        probability += product
    return probability


@pytest.mark.parametrize(
    ("selection", "samples", "weights"),
    [
        ("uniform", [1, 50, None, 7, 1000], [1, 1, 1, 1, 1]),
        ("data-size", [10, 20, 30, 40, 100], [10, 20, 30, 40, 100]),
        ("data-size", [10, None, 50, 60, None], [10, 40, 50, 60, 40]),
        ("data-size", [None] * 5, [1] * 5),
    ],
)
def test_every_set_is_as_likely_as_its_weights_say(
    seed: int, selection: str, samples: list[int | None], weights: list[float]
) -> None:
    came = drawn(selection, seed, candidates(samples), 2)
    sets = list(itertools.combinations(range(5), 2))
    expected = [DRAWS * successive(weights, chosen) for chosen in sets]
    assert sum(expected) == pytest.approx(DRAWS)
    assert chisquare([came[chosen] for chosen in sets], expected).pvalue > RARE


def test_the_oldest_come_first_and_equal_ones_at_random(seed: int) -> None:
    rounds = [5, 2, 9, 2, 2, 1]
    known = [Candidate(f"phone-{n}", "phone", None, round_) for n, round_ in enumerate(rounds)]
    came = drawn("oldest", seed, known, 3)
    # Position 5 is the oldest; two of the three with round 2 are the next.
    assert set(came) == {(1, 3, 5), (1, 4, 5), (3, 4, 5)}
    assert chisquare(list(came.values())).pvalue > RARE


def test_all_take_turns_by_the_oldest_policy(seed: int) -> None:
    last = [0] * 10
    for round_ in range(1, 31):
        known = [Candidate(f"phone-{n}", "phone", None, before) for n, before in enumerate(last)]
        for position in selected("oldest", np.random.default_rng([seed, round_]), known, 3):
            # Seven others are older, so it takes three rounds, or four.
            assert not last[position] or round_ - last[position] in (3, 4)
            last[position] = round_
        assert min(last) >= round_ - 4


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_draw_is_the_same_again_and_never_too_large(seed: int, selection: str) -> None:
    assert POLICIES.keys() == set(SELECTIONS)
    known = candidates([3, 1, None, 9])
    for count in (1, 3, 4, 9):
        one, two = (selected(selection, np.random.default_rng(seed), known, count) for _ in "ab")
        assert one == two
        assert len(set(one)) == len(one) == min(count, 4)


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_policies")
    monkeypatch.setitem(sys.modules, "own_policies", module)
    return module


def test_a_function_of_the_user(policies: ModuleType, seed: int) -> None:
    def largest(draw: object, known: list[Candidate], count: int) -> list[int]:
        return sorted(range(len(known)), key=lambda n: -(known[n].samples or 0))[:count]

    policies.largest = largest  # type: ignore[attr-defined]
    draw = np.random.default_rng(seed)
    assert selected("own_policies:largest", draw, candidates([3, 9, None, 5]), 2) == [1, 3]


@pytest.mark.parametrize(
    ("returned", "code"),
    [
        ([], "selection.bad-result"),
        ([0, 0], "selection.bad-result"),
        ([0, 1, 2], "selection.bad-result"),
        ([-1], "selection.bad-result"),
        ([4], "selection.bad-result"),
        (["phone-1"], "selection.failed"),
        (None, "selection.failed"),
    ],
)
def test_a_function_that_returns_nonsense(
    policies: ModuleType, returned: object, code: str
) -> None:
    policies.wrong = lambda *given: returned  # type: ignore[attr-defined]
    with refused(code, selection="own_policies:wrong"):
        selected("own_policies:wrong", np.random.default_rng(0), candidates([1] * 4), 2)


def test_a_function_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("data.function-not-loaded", function="no_such_module:policy"):
        selected("no_such_module:policy", np.random.default_rng(0), candidates([1]), 1)
