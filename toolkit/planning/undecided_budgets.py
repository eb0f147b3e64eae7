"""Notes in a plan about budgets that do not affect the choice."""

from collections.abc import Iterator

from profiles.cost_model.submodel_choice import RESOURCES, Budgets
from profiles.text_formatting import format_bytes, format_seconds
from toolkit.planning.strongest_first import Searched


def undecided(searched: Searched, budgets: Budgets) -> Iterator[str]:
    """One note if no budget excludes a candidate; else a note for each budget that excludes all."""
    if searched.chosen is not None:
        if not searched.excluded:
            chosen = searched.chosen.candidate.submodel
            yield f"the budgets decide nothing: without them, {chosen} would be chosen, too"
        return
    for resource in RESOURCES:
        budget = budgets.of(resource)
        needs = [entry.candidate.needs(resource) or 0.0 for entry in searched.excluded]
        if budget is not None and needs and min(needs) > budget:
            yield f"{resource}: every candidate needs at least {amount(resource, min(needs))}"


def amount(resource: str, value: float) -> str:
    """An amount of a resource with its unit."""
    return format_seconds(value) if resource == "step-time" else format_bytes(value)
