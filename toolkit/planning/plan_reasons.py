"""Explains why a candidate of a plan is not chosen, and which budget would allow it."""

import math
from collections.abc import Callable

from profiles.cost_model.submodel_choice import Candidate, Row
from profiles.errors import NothingFitsError
from profiles.text_formatting import bytes_as_option
from toolkit.planning.plan import Planned
from toolkit.planning.undecided_budgets import amount

Written = Callable[[str, float], str]
"""(resource, needed) -> a budget that allows `needed`, as an option or as a line of a TOML file."""


def as_option(resource: str, needed: float) -> str:
    """The command-line option that sets the budget of `resource` high enough for `needed`."""
    return f"--{resource} {budget(resource, needed)}"


def as_key(resource: str, needed: float) -> str:
    """The line of a federation's TOML file that sets a budget high enough for `needed`."""
    value = budget(resource, needed)
    return f"{resource.replace('-', '_')} = " + (value if resource == "step-time" else f'"{value}"')


def why(row: Row, chosen: Candidate | None, written: Written = as_option) -> str:
    """Why a candidate was not chosen: the exceeded budgets, and budgets that would allow it."""
    if row.candidate == chosen:
        return "chosen"
    if not row.excesses:
        weaker = chosen is not None and row.candidate.strength < chosen.strength
        return "fits, but weaker" if weaker else "fits and is as strong, but needs more"
    over = ", ".join(f"{e.resource}: over by {amount(e.resource, e.over)}" for e in row.excesses)
    needs = " ".join(written(e.resource, e.needed) for e in row.excesses)
    return f"{over} (would fit with {needs})"


def why_not_computed(row: Row, chosen: Candidate | None) -> str:
    """Why a candidate's figures were not computed: bounds exclude it, or `chosen` is as good."""
    if row.excesses:
        # The traffic of a round is exact even without an export.
        return ", ".join(
            f"{e.resource}: over by {'' if e.resource == 'bandwidth' else 'at least '}"
            f"{amount(e.resource, e.over)}"
            for e in row.excesses
        )
    assert chosen is not None
    if row.candidate.strength < chosen.strength:
        return f"not needed, because weaker than {chosen.submodel}"
    return f"not needed, because as strong as {chosen.submodel} and larger"


def budget(resource: str, needed: float) -> str:
    """The smallest budget that allows `needed`, rounded up and written as in an option."""
    if resource == "step-time":
        # Three significant digits, rounded up: a smaller budget would refuse the candidate.
        places = 2 - math.floor(math.log10(needed))
        return f"{math.ceil(needed * 10**places) / 10**places:g}"
    return bytes_as_option(needed)


def check_fits(planned: Planned, written: Written = as_option) -> None:
    """Raise NothingFitsError if no candidate fits. The message has budgets that would be enough."""
    if planned.plan.chosen is not None:
        return
    nearest = planned.plan.nearest
    if nearest is None:
        raise NothingFitsError(
            "None of the candidate submodels is possible for this model.",
            code="plan.no-candidate",
        )
    raise NothingFitsError(
        "No submodel fits {device}. {nearest} comes nearest; {reason}.",
        code="plan.nothing-fits",
        device=planned.device.name,
        nearest=nearest.candidate.submodel,
        exceeded=[excess.resource for excess in nearest.excesses],
        reason=why(nearest, None, written),
    )
