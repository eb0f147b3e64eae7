"""Choose the submodel for a device from its profile and the workloads of a model."""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from profiles.cost_model.prediction import in_browser
from profiles.cost_model.submodel_choice import Budgets, Plan, Row, excesses, plan
from profiles.documents.calibration_record import STALE_DAYS
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import InputError
from profiles.progress import Report, silent
from profiles.text_formatting import counted
from toolkit.planning.candidate_lookup import Lookup, candidate
from toolkit.planning.measured_runtimes import runtime_notes
from toolkit.planning.recomputed_variants import saves, trades
from toolkit.planning.strongest_first import Depth, Entry, search
from toolkit.planning.submodel_workloads import Impossible, Known, Workloads
from toolkit.planning.undecided_budgets import undecided

SHARE_OF_AVAILABLE = 0.8
"""The default budget, as a share of the memory that was available."""
SHARE_OF_TOTAL = 0.5
"""The default budget as a share of all memory, if the available memory is not known."""


@dataclass(frozen=True)
class Planned:
    """A plan for a device.

    Attributes:
        device: The device.
        budgets: The limits for a submodel. If no memory budget was given, the default is filled in.
        plan: The candidates whose figures were computed, and the chosen candidate.
        impossible: The submodels that are not possible for the model.
        notes: Assumptions for missing figures, reasons to doubt the plan, and a comparison of the
            device's runtimes if they were measured.
        exceeding: Candidates whose figures were not computed, because lower bounds already exceed
            a budget. Their figures are these bounds.
        not_needed: Candidates whose figures were not computed, because they cannot be better than
            the chosen candidate. Their strength is an upper bound, and their needs are lower
            bounds. A need of 0 is unknown.
    """

    device: DeviceProfile
    budgets: Budgets
    plan: Plan
    impossible: tuple[Impossible, ...]
    notes: tuple[str, ...]
    exceeding: tuple[Row, ...] = ()
    not_needed: tuple[Row, ...] = ()


def plan_for(
    device: DeviceProfile,
    workloads: Workloads,
    specs: Iterable[str],
    budgets: Budgets | None = None,
    today: datetime.date | None = None,
    progress: Report = silent,
) -> Planned:
    """Choose the strongest submodel that fits a device.

    Stronger submodels that exceed only the memory budget are also tried with `recompute=yes`. A
    submodel that then needs less memory becomes a candidate.

    Args:
        device: The device's profile.
        workloads: The workloads of the model's submodels.
        specs: The submodels to choose from.
        budgets: The limits for the submodel. The default for memory is a share of the device's
            memory.
        today: The date for which the profile's age is computed. Default: the current date.
        progress: Called with the name of each stage when it begins.

    Returns:
        The candidates, the chosen candidate and notes.

    Raises:
        InputError: There is no budget for memory, and the profile does not state the memory.
        SpecError: A spec is malformed, or its family is unknown.
    """
    wanted, day = budgets or Budgets(), today or datetime.date.today()
    limits, _ = with_memory(device, wanted)
    lookup = Lookup(device, workloads, limits.memory, progress)
    searched = search(lookup.listed(specs), lookup, limits)
    entries = [*searched.excluded, *searched.waiting]
    if searched.chosen is not None:
        entries.append(searched.chosen)
    computed = [entry for entry in entries if entry.depth is Depth.COMPUTED]
    plain = [entry.candidate for entry in computed]
    known = [
        lookup.known[entry.spec]
        for entry in computed
        if not entry.recomputes or saves(entry.candidate, plain)
    ]
    planned = decide(device, known, tuple(lookup.impossible), wanted, day)
    return replace(
        planned,
        exceeding=estimated(searched.excluded, limits),
        not_needed=estimated(searched.waiting, limits),
        notes=(*trades(planned.plan), *undecided(searched, limits), *planned.notes),
    )


def estimated(entries: Iterable[Entry], budgets: Budgets) -> tuple[Row, ...]:
    """A row for each of `entries` whose figures were not computed, best first."""
    return tuple(
        Row(candidate=entry.candidate, excesses=excesses(entry.candidate, budgets))
        for entry in sorted(entries, key=lambda entry: entry.order)
        if entry.depth is not Depth.COMPUTED
    )


def find_workloads(
    workloads: Workloads, specs: Iterable[str], progress: Report = silent
) -> tuple[list[Known], tuple[Impossible, ...]]:
    """The workloads of `specs`, and the specs that are impossible.

    Exports the submodels that are not in the cache. Each export takes seconds, and is reported as a
    stage.
    """
    results = {spec: workloads.remembered(spec) for spec in specs}
    new = [spec for spec, result in results.items() if result is None]
    if new:
        many = counted(len(results), "submodel")
        progress(f"{len(new)} of {many} to export, seconds to a minute each")
        progress(f"results are kept in {workloads.cache}")
    for number, spec in enumerate(new, 1):
        progress(f"exporting {spec} ({number} of {len(new)})")
        results[spec] = workloads.of(spec)
    known = [result for result in results.values() if isinstance(result, Known)]
    return known, tuple(outcome for outcome in results.values() if isinstance(outcome, Impossible))


def decide(
    device: DeviceProfile,
    known: Sequence[Known],
    impossible: tuple[Impossible, ...],
    budgets: Budgets,
    today: datetime.date,
) -> Planned:
    """Make the plan from the workloads `known`."""
    budgets, notes = with_memory(device, budgets)
    return Planned(
        device=device,
        budgets=budgets,
        plan=plan([candidate(workload, device, budgets.memory) for workload in known], budgets),
        impossible=impossible,
        notes=(*notes, *doubts(device, budgets, today), *runtime_notes(device)),
    )


def with_memory(device: DeviceProfile, budgets: Budgets) -> tuple[Budgets, list[str]]:
    """Fill in a missing memory budget, with a note. Raises InputError if memory is unknown."""
    if budgets.memory is not None:
        return budgets, []
    available, whole = device.memory_available_bytes, device.memory_bytes
    if available is not None:
        memory, of = SHARE_OF_AVAILABLE * available, "the memory that was available"
    elif whole is not None:
        memory, of = SHARE_OF_TOTAL * whole, "all memory; the available memory is not known"
    else:
        raise InputError(
            "The profile {device!r} does not say how much memory the device has: give a budget, "
            "for example --memory 256MB.",
            code="plan.unknown-memory",
            device=device.name,
        )
    share = SHARE_OF_AVAILABLE if available is not None else SHARE_OF_TOTAL
    note = f"memory budget: {share:.0%} of {of}; change it with --memory"
    return Budgets(memory=memory, step=budgets.step, traffic=budgets.traffic), [note]


def doubts(device: DeviceProfile, budgets: Budgets, today: datetime.date) -> list[str]:
    """Reasons to doubt a plan from this profile."""
    notes = []
    if device.calibration is None:
        notes.append(
            f"{device.name} was not calibrated: times are unknown"
            + (", so --step-time has no effect" if budgets.step is not None else "")
            + ", and the runtime's memory is assumed as on x86-64; run `edgetailor-agent "
            "calibrate --out FILE` on the device"
        )
    elif device.calibration.memory is None:
        where = "in Chromium" if in_browser(device.calibration) else "on x86-64"
        notes.append(f"the runtime's memory could not be measured: it is assumed as {where}")
    age = device.age_days(today)
    if device.calibration is not None and age > STALE_DAYS:
        notes.append(
            f"stale: the profile is {age} days old, over the limit of {STALE_DAYS} days; "
            "calibrate the device again"
        )
    if age < 0:
        notes.append(f"the profile's date {device.date} is in the future: check the clocks")
    return notes
