"""From a device's profile and a model to the submodel that the device gets."""

import datetime
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from profiles.cost_model.prediction import AT_WORK_BYTES, predict
from profiles.cost_model.submodel_choice import Budgets, Candidate, Figure, Plan, plan
from profiles.documents.device_profile import STALE_DAYS, DeviceProfile
from profiles.errors import InputError
from profiles.text_formatting import counted
from toolkit.planning.submodel_workloads import Impossible, Known, Workloads

logger = logging.getLogger(__name__)

SHARE_OF_AVAILABLE = 0.8
"""Of the memory that was available, what the agent may take where nobody says."""
SHARE_OF_TOTAL = 0.5
"""Of all memory, where it is not known how much of it is available."""


@dataclass(frozen=True)
class Planned:
    """A plan for `device` with what it was made from.

    `notes` say what was assumed for want of a figure, and what to doubt.
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
) -> Planned:
    """Plan `device` among the submodels `specs` of the model that `workloads` look at.

    Without a budget of memory the device gets a share of its own. Raises InputError where neither
    is known.
    """
    known, impossible = looked_at(workloads, specs)
    return decide(device, known, impossible, budgets or Budgets(), today or datetime.date.today())


def looked_at(
    workloads: Workloads, specs: Iterable[str]
) -> tuple[list[Known], tuple[Impossible, ...]]:
    """The workloads of `specs`, and those that there are none of.

    What is not remembered is exported, which is logged.
    """
    found = {spec: workloads.remembered(spec) for spec in specs}
    new = [spec for spec, one in found.items() if one is None]
    if new:
        many = counted(len(found), "submodel")
        logger.info("%d of %s to export, seconds to a minute each", len(new), many)
        logger.info("results are kept in %s", workloads.cache)
    for number, spec in enumerate(new, 1):
        logger.info("exporting %s (%d of %d)", spec, number, len(new))
        found[spec] = workloads.of(spec)
    known = [one for one in found.values() if isinstance(one, Known)]
    return known, tuple(one for one in found.values() if isinstance(one, Impossible))


def decide(
    device: DeviceProfile,
    known: Sequence[Known],
    impossible: tuple[Impossible, ...],
    budgets: Budgets,
    today: datetime.date,
) -> Planned:
    """The plan from workloads that are known."""
    budgets, notes = with_memory(device, budgets)
    return Planned(
        device=device,
        budgets=budgets,
        plan=plan([candidate(one, device) for one in known], budgets),
        impossible=impossible,
        notes=(*notes, *doubts(device, budgets, today)),
    )


def candidate(known: Known, device: DeviceProfile) -> Candidate:
    """`known` with what the agent takes on `device` while it trains that."""
    found = predict(known.work, device.calibration)
    memory = Figure(found.memory.value + AT_WORK_BYTES, found.memory.upper + AT_WORK_BYTES)
    return Candidate(
        submodel=known.submodel,
        strength=known.strength,
        memory=memory,
        step=found.step,
        traffic=known.work.down + known.work.up,
    )


def with_memory(device: DeviceProfile, budgets: Budgets) -> tuple[Budgets, list[str]]:
    """`budgets` with one of memory, and what was taken for it. Raises InputError."""
    if budgets.memory is not None:
        return budgets, []
    available, whole = device.memory_available_bytes, device.memory_bytes
    if available is not None:
        memory, of = SHARE_OF_AVAILABLE * available, "the memory that was available"
    elif whole is not None:
        memory, of = SHARE_OF_TOTAL * whole, "all memory; how much is available is not known"
    else:
        raise InputError(
            f"The profile {device.name!r} does not say how much memory the device has: give a "
            "budget, for example --memory 256MB.",
            code="plan.unknown-memory",
            device=device.name,
        )
    share = SHARE_OF_AVAILABLE if available is not None else SHARE_OF_TOTAL
    note = f"memory budget: {share:.0%} of {of}; --memory sets another"
    return Budgets(memory=memory, step=budgets.step, traffic=budgets.traffic), [note]


def doubts(device: DeviceProfile, budgets: Budgets, today: datetime.date) -> list[str]:
    """What to know about a plan from this profile."""
    notes = []
    if device.calibration is None:
        notes.append(
            f"{device.name} was not calibrated: times are unknown"
            + (", so that --step-time decides nothing" if budgets.step is not None else "")
            + ", and the runtime's memory is what it was on x86-64; run `edgetailor-agent "
            "calibrate --out FILE` on the device"
        )
    elif device.calibration.memory is None:
        notes.append("the runtime's memory could not be measured: what it was on x86-64 is taken")
    age = device.age_days(today)
    if device.calibration is not None and age > STALE_DAYS:
        notes.append(
            f"stale: the profile is {age} days old, and more than {STALE_DAYS} are doubtful; "
            "calibrate the device again"
        )
    if age < 0:
        notes.append(f"the profile is dated {device.date}, in the future: is a clock wrong?")
    return notes
