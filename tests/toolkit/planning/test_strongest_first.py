"""The search from the strongest candidate down, against one that computes every candidate."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from profiles.cost_model.submodel_choice import Budgets, Candidate, Figure
from toolkit.planning.strongest_first import Depth, Entry, search, unknown

VARIANT = ",recompute=yes"


@dataclass
class Submodels:
    """Submodels whose needs are made up. `looks` are the specs that were looked at, by depth.

    `exact` are their candidates, those of the variants included; the others are impossible. A
    candidate is listed with strength `most`, and estimated with needs of `least`.
    """

    exact: dict[str, Candidate]
    least: dict[str, Candidate]
    most: dict[str, float]
    looks: list[tuple[str, Depth]] = field(default_factory=list)

    def listed(self) -> list[Entry]:
        return [
            Entry(spec, Depth.LISTED, unknown(spec, strength))
            for spec, strength in self.most.items()
        ]

    def __call__(self, entry: Entry) -> Entry | None:
        depth = Depth(entry.depth + 1)
        self.looks.append((entry.spec, depth))
        known = self.least if depth is Depth.ESTIMATED else self.exact
        if entry.spec not in known:
            return None
        return Entry(entry.spec, depth, known[entry.spec], entry.recomputes)

    def computed(self) -> list[str]:
        return [spec for spec, depth in self.looks if depth is Depth.COMPUTED]


def candidate(
    spec: str, strength: float, memory: float, step: float | None = None, traffic: int = 1
) -> Candidate:
    return Candidate(
        submodel=spec,
        strength=strength,
        memory=Figure(memory, memory),
        step=None if step is None else Figure(step, step),
        traffic=traffic,
    )


def fits(one: Candidate, budgets: Budgets) -> bool:
    """Whether no budget is exceeded."""
    return (
        (budgets.memory is None or one.memory.upper <= budgets.memory)
        and (budgets.step is None or one.step is None or one.step.upper <= budgets.step)
        and (budgets.traffic is None or one.traffic <= budgets.traffic)
    )


def best(candidates: Iterable[Candidate], budgets: Budgets) -> Candidate | None:
    """The strongest that fits; of equals, the one with the least memory, time, and traffic."""
    return min(
        (one for one in candidates if fits(one, budgets)),
        key=lambda one: (
            *(-one.strength, one.memory.upper, one.step.upper if one.step else 0),
            *(one.traffic, one.submodel),
        ),
        default=None,
    )


def chosen_by_computing_all(submodels: Submodels, budgets: Budgets) -> str | None:
    """Compute all, then the variants of those that are stronger and that memory alone excludes."""
    plain = [one for spec, one in submodels.exact.items() if spec in submodels.most]
    chosen = best(plain, budgets)
    variants = [
        submodels.exact[one.submodel + VARIANT]
        for one in plain
        if budgets.memory is not None
        and budgets.memory < one.memory.upper <= 2 * budgets.memory
        and fits(replace(one, memory=Figure(0, 0)), budgets)
        and (chosen is None or one.strength > chosen.strength)
        and one.submodel + VARIANT in submodels.exact
    ]
    chosen = best([*plain, *variants], budgets)
    return None if chosen is None else chosen.submodel


amounts = st.integers(1, 12)
maybe = st.none() | amounts
budgets = st.builds(Budgets, memory=maybe, step=maybe, traffic=maybe)


@st.composite
def worlds(draw: st.DrawFn) -> Submodels:
    """Submodels with equal and different strengths; needs do not grow with the strength."""
    submodels = Submodels({}, {}, {})
    timed = draw(st.booleans())
    for number in range(draw(st.integers(0, 7))):
        spec, strength = f"cp:{number}", draw(st.integers(1, 4)) / 4
        submodels.most[spec] = draw(st.sampled_from([strength, 1.0]))
        memory, traffic = draw(amounts), draw(amounts)
        step = draw(amounts) if timed else None
        exact = candidate(spec, strength, memory, step, traffic)
        share = draw(st.sampled_from([0.0, 0.5, 1.0]))
        possible = draw(st.sampled_from(["yes", "yes", "yes", "split", "no"]))
        if possible != "no":
            submodels.least[spec] = candidate(
                spec, strength, share * memory, None if step is None else share * step, traffic
            )
        if possible == "yes":
            submodels.exact[spec] = exact
            if draw(st.booleans()):
                # A lower bound also bounds the variant.
                lighter = max(draw(amounts), share * memory)
                name = spec + VARIANT
                submodels.exact[name] = candidate(
                    name, strength, lighter, step and step + 1, traffic
                )
    return submodels


@given(worlds(), budgets)
def test_the_choice_is_that_of_computing_all(submodels: Submodels, budget: Budgets) -> None:
    chosen = search(submodels.listed(), submodels, budget).chosen
    expected = chosen_by_computing_all(submodels, budget)
    assert (None if chosen is None else chosen.candidate.submodel) == expected


@given(worlds(), budgets)
def test_nothing_is_computed_that_cannot_be_chosen(submodels: Submodels, budget: Budgets) -> None:
    searched = search(submodels.listed(), submodels, budget)
    computed = submodels.computed()
    assert len(computed) == len(set(computed))
    hopeless = {spec for spec, least in submodels.least.items() if not fits(least, budget)}
    if searched.chosen is None:
        # One may be computed all the same, to name budgets that would be enough.
        named = {spec for spec in computed if spec in hopeless and spec in submodels.exact}
        assert len(named) <= 1
        return
    assert not hopeless.intersection(computed)
    strength = searched.chosen.candidate.strength
    assert all(
        submodels.least[spec.removesuffix(VARIANT)].strength >= strength for spec in computed
    )


@given(worlds(), budgets)
def test_every_candidate_has_one_place(submodels: Submodels, budget: Budgets) -> None:
    searched = search(submodels.listed(), submodels, budget)
    entries = [*searched.excluded, *searched.waiting, *filter(None, [searched.chosen])]
    specs = [entry.spec for entry in entries if not entry.recomputes]
    looked = set(submodels.looks)
    impossible = {
        spec
        for spec in submodels.most
        if ((spec, Depth.ESTIMATED) in looked and spec not in submodels.least)
        or ((spec, Depth.COMPUTED) in looked and spec not in submodels.exact)
    }
    assert sorted([*specs, *impossible]) == sorted(submodels.most)
    assert all(not fits(entry.candidate, budget) for entry in searched.excluded)


def made(*exact: Candidate) -> Submodels:
    """Submodels of which the strength and the traffic are known without computing them."""
    named = {one.submodel: one for one in exact}
    plain = [one for one in exact if not one.submodel.endswith(VARIANT)]
    least = {one.submodel: replace(one, memory=Figure(0, 0)) for one in plain}
    return Submodels(named, least, {one.submodel: one.strength for one in plain})


def test_only_stronger_submodels_that_memory_alone_excludes_are_tried() -> None:
    submodels = made(
        candidate("full", 1.0, 190),
        candidate("full,recompute=yes", 1.0, 190),
        candidate("low-rank:0.9", 0.9, 210),  # more than twice the budget
        candidate("width:0.8", 0.8, 150, traffic=9),  # sends too much
        candidate("slice:0.65,recompute=no", 0.65, 120),
        candidate("slice:0.6+low-rank:0.5", 0.6, 110),
        candidate("width:0.5", 0.5, 90),
        candidate("width:0.4", 0.4, 80),
    )
    searched = search(submodels.listed(), submodels, Budgets(memory=100, traffic=5))
    assert searched.chosen is not None
    assert searched.chosen.spec == "width:0.5"
    assert [entry.spec for entry in searched.waiting] == ["width:0.4"]
    variants = ["full,recompute=yes", "slice:0.6+low-rank:0.5,recompute=yes"]
    assert [spec for spec in submodels.computed() if spec.endswith(VARIANT)] == variants
    submodels.exact[variants[1]] = candidate(variants[1], 0.6, 100)
    searched = search(submodels.listed(), submodels, Budgets(memory=100, traffic=5))
    assert searched.chosen is not None
    assert searched.chosen.spec == variants[1]


def test_strength_and_memory_need_not_fall_together() -> None:
    """The weaker one needs more, so no bisection is possible."""
    submodels = made(
        candidate("full", 1.0, 9), candidate("width:0.5", 0.5, 12), candidate("cp:4", 0.25, 3)
    )
    for memory, expected in [(20, "full"), (9, "full"), (8, "cp:4"), (3, "cp:4"), (2, None)]:
        chosen = search(submodels.listed(), submodels, Budgets(memory=memory)).chosen
        assert (chosen and chosen.spec) == expected


@pytest.mark.parametrize("given", [True, False])
def test_a_variant_that_was_asked_for_is_no_variant(given: bool) -> None:
    submodels = made(candidate("full", 1.0, 110), candidate("full,recompute=yes", 1.0, 90))
    if given:
        submodels.most["full,recompute=yes"] = 1.0
        submodels.least["full,recompute=yes"] = candidate("full,recompute=yes", 1.0, 0)
    searched = search(submodels.listed(), submodels, Budgets(memory=100))
    assert searched.chosen is not None
    assert (searched.chosen.spec, searched.chosen.recomputes) == ("full,recompute=yes", not given)
    assert submodels.computed() == ["full", "full,recompute=yes"]


def test_an_equal_that_fits_is_better_than_a_variant() -> None:
    """Even if the variant needs less: it is not tried."""
    submodels = made(
        candidate("full", 1.0, 110),
        candidate("full,recompute=yes", 1.0, 80),
        candidate("pfedme", 1.0, 95),
    )
    searched = search(submodels.listed(), submodels, Budgets(memory=100))
    assert searched.chosen is not None
    assert searched.chosen.spec == "pfedme"
    assert submodels.computed() == ["full", "pfedme"]
