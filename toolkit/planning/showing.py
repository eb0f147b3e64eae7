"""A plan for people, and as JSON."""

from textwrap import fill
from typing import Any

from rich.console import Console

from profiles.device import DeviceProfile, built_in, load_device
from profiles.errors import NothingFitsError
from profiles.planner import Candidate, Figure, Row
from toolkit.planning.planning import Planned
from toolkit.tables import size, table

PLAN_VERSION = 1


def show_plan(planned: Planned) -> None:
    """All candidates, best first, with what each takes and why it was passed over."""
    console = Console(highlight=False)
    console.print(f"{planned.device.name}: {allowed(planned)}", markup=False)
    rows = table("submodel", "strength", "memory", "step", "sent", "")
    rows.columns[-1].justify = "left"
    for row in planned.plan.rows:
        one = row.candidate
        step = "unknown" if one.step is None else span(one.step, milliseconds)
        memory = span(one.memory, size)
        verdict = why(row, planned.plan.chosen)
        rows.add_row(one.submodel, f"{one.strength:.2f}", memory, step, size(one.traffic), verdict)
    console.print(rows)
    print(
        fill(
            "memory and step: predicted, and the upper bound that a budget must allow; memory is "
            "the agent's process at its peak, step one batch, sent both ways in a round",
            console.width,
        )
    )
    for note in planned.notes:
        print(fill(f"note: {note}", console.width, subsequent_indent="  "))
    for one in planned.impossible:
        reason = f"not possible: {one.submodel}: {one.reason}"
        print(fill(reason, console.width, subsequent_indent="  ", break_long_words=False))
    if planned.plan.chosen is not None:
        print(f"chosen: {planned.plan.chosen.submodel}")


def allowed(planned: Planned) -> str:
    """The budgets, for people."""
    budgets = planned.budgets
    parts = [] if budgets.memory is None else [f"{size(budgets.memory)} of memory"]
    if budgets.step is not None:
        parts.append(f"{milliseconds(budgets.step)} a step")
    if budgets.traffic is not None:
        parts.append(f"{size(budgets.traffic)} sent in a round")
    return ", ".join(parts)


def span(figure: Figure, unit: Any) -> str:
    """A prediction and its upper bound."""
    return f"{unit(figure.value)} to {unit(figure.upper)}"


def milliseconds(seconds: float) -> str:
    """A time for people."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def amount(resource: str, value: float) -> str:
    """So much of a resource."""
    return milliseconds(value) if resource == "step-time" else size(value)


def why(row: Row, chosen: Candidate | None) -> str:
    """Why a candidate was passed over; its binding constraint comes first."""
    if row.candidate == chosen:
        return "chosen"
    if not row.excesses:
        return "weaker" if chosen and row.candidate.strength < chosen.strength else "needs more"
    return ", ".join(f"{e.resource}: over by {amount(e.resource, e.over)}" for e in row.excesses)


def check_fits(planned: Planned) -> None:
    """Raise NothingFitsError where nothing does, saying what would."""
    if planned.plan.chosen is not None:
        return
    nearest = planned.plan.nearest
    if nearest is None:
        raise NothingFitsError("The model gives none of the submodels to choose from.")
    needs = " and ".join(
        f"--{e.resource} of at least {amount(e.resource, e.needed)} instead of "
        f"{amount(e.resource, e.budget)}"
        for e in nearest.excesses
    )
    raise NothingFitsError(
        f"Nothing fits {planned.device.name}. {nearest.candidate.submodel} comes nearest; it needs "
        f"{needs}."
    )


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
        "impossible": [
            {"submodel": one.submodel, "reason": one.reason} for one in planned.impossible
        ],
        "notes": list(planned.notes),
    }


def row_as_json(row: Row, chosen: Candidate | None) -> dict[str, Any]:
    """A candidate."""
    one = row.candidate
    return {
        "submodel": one.submodel,
        "strength": one.strength,
        "memory_bytes": round(one.memory.value),
        "memory_upper_bytes": round(one.memory.upper),
        "step_s": None if one.step is None else one.step.value,
        "step_upper_s": None if one.step is None else one.step.upper,
        "traffic_bytes": one.traffic,
        "fits": not row.excesses,
        "binding": None if row.binding is None else row.binding.resource,
        "exceeded": [
            {"budget": e.resource, "over": e.over, "smallest_admitting": e.needed}
            for e in row.excesses
        ],
        "verdict": why(row, chosen),
    }


def show_profiles() -> None:
    """The built-in device profiles."""
    rows = table("profile", "device", "memory", "cores")
    rows.columns[1].justify = "left"
    for name in built_in():
        device = load_device(name)
        memory = "unknown" if device.memory_bytes is None else size(device.memory_bytes)
        rows.add_row(name, title(device), memory, str(device.cores or "unknown"))
    Console(highlight=False).print(rows)
    print("published figures; none is calibrated, so that plans from them know no times")


def title(device: DeviceProfile) -> str:
    """What a person calls the device."""
    return device.title or device.name
