"""The planner's decision: laws that hold for any candidates and budgets."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from profiles.cost_model.submodel_choice import Budgets, Candidate, Excess, Figure, Plan, plan

MB = 10**6


def candidate(
    name: str, strength: float, memory: float, step: float | None, traffic: int = 0
) -> Candidate:
    """A candidate whose upper bounds are a tenth above what is predicted."""
    return Candidate(
        submodel=name,
        strength=strength,
        memory=Figure(memory / 1.1, memory),
        step=None if step is None else Figure(step / 1.1, step),
        traffic=traffic,
    )


amounts = st.integers(1, 12)
candidates = st.lists(
    st.tuples(amounts, amounts, st.none() | amounts, amounts), min_size=1, max_size=6
).map(
    lambda rows: [
        candidate(f"cp:{n}", strength / 12, memory, step, traffic)
        for n, (strength, memory, step, traffic) in enumerate(rows)
    ]
)
budgets = st.builds(
    Budgets, memory=st.none() | amounts, step=st.none() | amounts, traffic=st.none() | amounts
)


@given(candidates, budgets)
def test_no_budget_is_ever_exceeded(found: list[Candidate], budget: Budgets) -> None:
    chosen = plan(found, budget).chosen
    if chosen is not None:
        assert budget.memory is None or chosen.memory.upper <= budget.memory
        assert budget.traffic is None or chosen.traffic <= budget.traffic
        assert budget.step is None or chosen.step is None or chosen.step.upper <= budget.step


@given(candidates, budgets)
def test_nothing_stronger_would_have_fitted(found: list[Candidate], budget: Budgets) -> None:
    decided = plan(found, budget)
    fitting = [
        one.strength
        for one in found
        if (budget.memory is None or one.memory.upper <= budget.memory)
        and (budget.traffic is None or one.traffic <= budget.traffic)
        and (budget.step is None or one.step is None or one.step.upper <= budget.step)
    ]
    strength = None if decided.chosen is None else decided.chosen.strength
    assert strength == max(fitting, default=None)


@given(candidates, budgets, st.sampled_from(["memory", "step", "traffic"]), amounts)
def test_a_larger_budget_never_gives_a_weaker_choice(
    found: list[Candidate], budget: Budgets, which: str, more: int
) -> None:
    own = {name: getattr(budget, name) for name in ("memory", "step", "traffic")}
    larger = Budgets(**{**own, which: None if own[which] is None else own[which] + more})
    before, after = plan(found, budget).chosen, plan(found, larger).chosen
    if before is not None:
        assert after is not None
        assert after.strength >= before.strength


@given(candidates, budgets, st.randoms())
def test_the_order_of_the_candidates_is_of_no_matter(
    found: list[Candidate], budget: Budgets, random: object
) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan(shuffled, budget) == plan(found, budget)


@given(candidates, budgets)
def test_the_smallest_admitting_budgets_admit(found: list[Candidate], budget: Budgets) -> None:
    for row in plan(found, budget).rows:
        needed = {excess.resource: excess.needed for excess in row.excesses}
        admitting = Budgets(
            memory=needed.get("memory", budget.memory),
            step=needed.get("step-time", budget.step),
            traffic=needed.get("bandwidth", budget.traffic),
        )
        assert plan([row.candidate], admitting).chosen == row.candidate
        for excess in row.excesses:
            assert excess.over > 0


def test_the_binding_budget_is_the_one_exceeded_most() -> None:
    big = candidate("full", 1.0, memory=150 * MB, step=0.9)
    [row] = plan([big], Budgets(memory=100 * MB, step=0.3)).rows
    assert row.binding == Excess(resource="step-time", needed=0.9, budget=0.3)
    assert [(e.resource, e.over) for e in row.excesses] == [
        ("step-time", 0.9 - 0.3),
        ("memory", 50 * MB),
    ]


def test_of_equally_strong_ones_the_smaller_is_chosen() -> None:
    candidates = [
        candidate("pfedme", 1.0, 90, 2.0),
        candidate("full", 1.0, 80, 2.0),
        candidate("width:0.5", 0.5, 10, 0.1),
    ]
    plans = {plan(order, Budgets(memory=100)).chosen for order in permutations(candidates)}
    assert plans == {candidates[1]}


def test_a_time_that_is_not_known_binds_nothing() -> None:
    unknown = candidate("full", 1.0, 10, None)
    assert plan([unknown], Budgets(step=1e-9)).chosen == unknown


def test_where_nothing_fits_the_nearest_is_named() -> None:
    candidates = [candidate("full", 1.0, 400, 1.0), candidate("width:0.5", 0.5, 200, 0.5)]
    decided = plan(candidates, Budgets(memory=100, step=0.4))
    assert decided.chosen is None
    assert decided.nearest is not None
    assert decided.nearest.candidate.submodel == "width:0.5"
    assert plan([], Budgets()) == Plan(rows=(), chosen=None)
