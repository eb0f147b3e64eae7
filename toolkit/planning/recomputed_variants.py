"""Finds submodels that fit only with `recompute=yes`: training then computes activations again.

The planner tries this only for submodels that are stronger than the chosen submodel and exceed only
the memory budget.
"""

from collections.abc import Iterable, Iterator

from profiles.cost_model.submodel_choice import Candidate, Plan, Row
from profiles.text_formatting import format_bytes
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.spec_form import RECOMPUTE

MOST = 2.0
"""A submodel that needs over this many times the memory budget is not tried. In the benchmarks,
no step shrinks to less than half."""
SUFFIX = f",{RECOMPUTE.name}={RECOMPUTE.words[1]}"


def decides(spec: str) -> bool:
    """Whether `spec` sets the option `recompute`."""
    return any(RECOMPUTE.name in own.options for own in parse_spec(spec).nested())


def is_excluded_by_memory_alone(row: Row) -> bool:
    """Whether a candidate exceeds only the memory budget, and not by far.

    It may need at most `MOST` times the budget.
    """
    if [excess.resource for excess in row.excesses] != ["memory"]:
        return False
    return row.excesses[0].needed <= MOST * row.excesses[0].budget


def saves(variant: Candidate, others: Iterable[Candidate]) -> bool:
    """Whether `variant` needs less memory than its submodel in `others`, which lacks the option."""
    return any(
        plain.submodel + SUFFIX == variant.submodel and variant.memory.upper < plain.memory.upper
        for plain in others
    )


def trades(plan: Plan) -> Iterator[str]:
    """A note on each variant in `plan`: the memory that it saves, and the time that it costs."""
    rows = {row.candidate.submodel: row.candidate for row in plan.rows}
    for name, variant in rows.items():
        plain = rows.get(name.removesuffix(SUFFIX))
        if plain is None or plain is variant:
            continue
        saved = plain.memory.value - variant.memory.value
        less = f"{format_bytes(saved)} less memory" if saved > 0 else "no less memory"
        cost = " and more time"
        if plain.step is not None and variant.step is not None:
            longer = 100 * (variant.step.value / plain.step.value - 1)
            cost = f" and {longer:.0f}% more time" if longer >= 0.5 else " and no more time"
        yield f"{name} trains what {plain.submodel} trains, with {less}{cost}"
