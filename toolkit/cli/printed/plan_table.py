"""Print a plan as a table, or write it as JSON."""

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console

from profiles.cost_model.submodel_choice import Candidate, Figure, Row, preference
from profiles.text_formatting import UNKNOWN_CELL, format_bytes, format_seconds
from toolkit.planning.plan import Planned
from toolkit.planning.plan_reasons import why, why_not_computed
from toolkit.terminal_output import filled, table

PLAN_VERSION = 2
"""Version 2 moved the candidates that were not computed from `candidates` to `not_computed`."""
MOST_PLACES = 6


def show_plan(planned: Planned) -> None:
    """Print the candidates, best first, and for each the reason why it was chosen or not."""
    console = Console(highlight=False)
    console.print(f"{planned.device.name}: {allowed(planned)}", markup=False)
    chosen = planned.plan.chosen
    figures = [(row, span) for row in planned.plan.rows]
    figures += [(row, at_least) for row in planned.exceeding]
    figures.sort(key=lambda line: preference(line[0].candidate))
    strengths = {row.candidate.strength for row, _ in figures}
    rows = table("submodel", "strength", "memory", "step", "sent")
    for row, write in figures:
        candidate = row.candidate
        step = "unknown" if candidate.step is None else write(candidate.step, format_seconds)
        memory = write(candidate.memory, format_bytes)
        strength = distinct(candidate.strength, strengths)
        rows.add_row(candidate.submodel, strength, memory, step, format_bytes(candidate.traffic))
    console.print(rows)
    say(
        "memory and step: predicted - upper bound; the budget must allow the upper bound. memory: "
        "peak of the agent's process. step: one batch. sent: both ways in a round"
    )
    if planned.exceeding:
        say(">=: estimated without an export; the upper bound is at least this")
    print()
    for row in planned.plan.rows:
        say(f"{row.candidate.submodel}: {why(row, chosen)}")
    groups: dict[str, list[str]] = {}
    for row in planned.exceeding:
        budgets = " and ".join(excess.resource for excess in row.excesses)
        groups.setdefault(f"over {budgets} by estimate", []).append(row.candidate.submodel)
    for row in planned.not_needed:
        groups.setdefault(why_not_computed(row, chosen), []).append(row.candidate.submodel)
    for reason, submodels in groups.items():
        say(f"{reason}: {', '.join(submodels)}")
    for other in planned.impossible:
        reason = other.reason.removeprefix(f"{other.submodel!r}: ")
        say(f"{other.submodel}: not possible: {reason}")
    for note in planned.notes:
        say(f"note: {note}")


def distinct(value: float, others: Iterable[float]) -> str:
    """Write a strength with two decimals, or with more if another strength has the same text.

    The text differs from the texts of 0, 1 and the strengths `others`.
    """
    if value == round(value, 2):
        return f"{value:.2f}"
    different = {0.0, 1.0, *others} - {value}
    for places in range(2, MOST_PLACES):
        text = f"{value:.{places}f}"
        if all(f"{other:.{places}f}" != text for other in different):
            return text
    return f"{value:.{MOST_PLACES}f}"


def say(sentence: str) -> None:
    """Print a sentence in lines of the terminal's width."""
    width = Console().width
    print(filled(sentence, width, "  "))


def allowed(planned: Planned) -> str:
    """The budgets as text."""
    budgets = planned.budgets
    parts = [] if budgets.memory is None else [f"{format_bytes(budgets.memory)} of memory"]
    if budgets.step is not None:
        parts.append(f"{format_seconds(budgets.step)} a step")
    if budgets.traffic is not None:
        parts.append(f"{format_bytes(budgets.traffic)} sent in a round")
    return ", ".join(parts)


def at_least(figure: Figure, unit: Callable[[float], str]) -> str:
    """The table cell of a figure that is only a lower bound, such as >=20 MB; a dash if unknown."""
    return f">={unit(figure.upper)}" if figure.upper else UNKNOWN_CELL


def span(figure: Figure, unit: Callable[[float], str]) -> str:
    """A prediction and its upper bound. If both have the same unit, the unit is written once."""
    low, high = unit(figure.value).split(), unit(figure.upper).split()
    return " ".join([f"{low[0]}-{high[0]}", high[1]] if low[1] == high[1] else [*low, "-", *high])


def as_json(planned: Planned) -> dict[str, Any]:
    """The document that `plan --json` prints."""
    budgets, chosen = planned.budgets, planned.plan.chosen
    return {
        "version": PLAN_VERSION,
        "device": planned.device.name,
        "budgets": {
            "memory_bytes": budgets.memory,
            "step_s": budgets.step,
            "traffic_bytes": budgets.traffic,
        },
        "chosen": None if chosen is None else chosen.submodel,
        "candidates": [row_as_json(row, chosen) for row in planned.plan.rows],
        "not_computed": [
            estimate_as_json(row, chosen) for row in (*planned.exceeding, *planned.not_needed)
        ],
        "impossible": [
            {"submodel": spec.submodel, "reason": spec.reason} for spec in planned.impossible
        ],
        "notes": list(planned.notes),
    }


def estimate_as_json(row: Row, chosen: Candidate | None) -> dict[str, Any]:
    """The JSON entry of a candidate whose figures were not computed; null means unknown."""
    candidate = row.candidate
    step = None if candidate.step is None else candidate.step.upper or None
    return {
        "submodel": candidate.submodel,
        "strength_at_most": candidate.strength,
        "memory_upper_bytes_at_least": round(candidate.memory.upper) or None,
        "step_upper_s_at_least": step,
        "traffic_bytes": candidate.traffic or None,
        "exceeded": [{"budget": e.resource, "over_at_least": e.over} for e in row.excesses],
        "verdict": why_not_computed(row, chosen),
    }


def row_as_json(row: Row, chosen: Candidate | None) -> dict[str, Any]:
    """The JSON entry of one candidate."""
    candidate = row.candidate
    return {
        "submodel": candidate.submodel,
        "strength": candidate.strength,
        "memory_bytes": round(candidate.memory.value),
        "memory_upper_bytes": round(candidate.memory.upper),
        "step_s": None if candidate.step is None else candidate.step.value,
        "step_upper_s": None if candidate.step is None else candidate.step.upper,
        "traffic_bytes": candidate.traffic,
        "fits": not row.excesses,
        "binding": None if row.binding is None else row.binding.resource,
        "exceeded": [
            {"budget": e.resource, "over": e.over, "smallest_admitting": e.needed}
            for e in row.excesses
        ],
        "verdict": why(row, chosen),
    }
