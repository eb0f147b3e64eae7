"""Choose the submodel for a device from its profile and the workloads of a model."""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from profiles.cost_model.memory_rule import AGENT_RESERVE_BYTES as RESERVE
from profiles.cost_model.prediction import in_browser, predict
from profiles.cost_model.submodel_choice import Budgets, Candidate, Figure, Plan, plan
from profiles.documents.calibration_record import STALE_DAYS
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import InputError
from profiles.progress import Report, silent
from profiles.text_formatting import counted
from toolkit.planning.measured_runtimes import runtime_notes
from toolkit.planning.recomputed_variants import saving, trades, worth_recomputing
from toolkit.planning.submodel_workloads import Impossible, Known, Workloads

SHARE_OF_AVAILABLE = 0.8
"""The default budget, as a share of the memory that was available."""
SHARE_OF_TOTAL = 0.5
"""The default budget as a share of all memory, if the available memory is not known."""


@dataclass(frozen=True)
class Planned:
    """A plan for a device.

    Attributes:
        device: The device.
        budgets: What a submodel may use. If no memory was given, it has the default.
        plan: The candidates and the chosen one.
        impossible: The submodels that are not possible for the model.
        notes: Assumptions for missing figures, reasons to doubt the plan, and a comparison of the
            device's runtimes if they were measured.
    """

    device: DeviceProfile
    budgets: Budgets
    plan: Plan
    impossible: tuple[Impossible, ...]
    notes: tuple[str, ...]


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
        budgets: What the submodel may use. The default for memory is a share of the device's.
        today: The date from which the profile's age is counted; today by default.
        progress: Called with the name of each stage when it begins.

    Returns:
        All candidates, the chosen one and notes.

    Raises:
        InputError: There is no budget for memory, and the profile does not state the memory.
        SpecError: A spec is malformed, or its family is unknown.
    """
    known, impossible = find_workloads(workloads, specs, progress)
    limits, day = budgets or Budgets(), today or datetime.date.today()
    planned = decide(device, known, impossible, limits, day)
    again, _ = find_workloads(workloads, worth_recomputing(planned.plan), progress)
    lighter = saving(
        planned.plan, [candidate(variant, device, planned.budgets.memory) for variant in again]
    )
    if not lighter:
        return planned
    known += [variant for variant in again if variant.submodel in {c.submodel for c in lighter}]
    planned = decide(device, known, impossible, limits, day)
    return replace(planned, notes=(*trades(planned.plan), *planned.notes))


def find_workloads(
    workloads: Workloads, specs: Iterable[str], progress: Report = silent
) -> tuple[list[Known], tuple[Impossible, ...]]:
    """The workloads of `specs`, and the specs that are impossible.

    Exports the submodels that are not in the cache. Each export takes seconds and is a stage.
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


def candidate(known: Known, device: DeviceProfile, budget: float | None = None) -> Candidate:
    """Predict the memory and time that the agent needs to train `known` on `device`.

    An agent can run a graph in several forms. With a `budget` in bytes, the prediction assumes that
    the agent does not use forms that may need more memory than this.
    """
    left = None if budget is None else budget - RESERVE
    predicted = predict(known.work, device.calibration, left)
    memory = Figure(predicted.memory.value + RESERVE, predicted.memory.upper + RESERVE)
    return Candidate(
        submodel=known.submodel,
        strength=known.strength,
        memory=memory,
        step=predicted.step,
        traffic=known.work.down + known.work.up,
    )


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
