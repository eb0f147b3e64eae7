"""Memory and time of one batch, by phase, for each submodel of a report.

The phases are the phases of EmbracingFL, Table 8: the forward pass, with its frozen stages shown
separately, and backpropagation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from device_agent.profiling.profile_text import label
from profiles.documents.bundle_profile import Duration, Machine, Phase, Profile
from profiles.documents.profile_merging import merge, refuse_other_machine, refuse_other_method
from profiles.errors import InputError

REPORT_VERSION = 1
Part = Literal["idle", "stages", "forward", "backprop"]


@dataclass(frozen=True)
class Cost:
    """The cost of one submodel for one batch. Memory in bytes, time in seconds.

    Attributes:
        profile: The measured profile.
        memory: The bytes that each part adds to the parts before it. The sum is the process peak.
            Empty if memory was not measurable.
        decisive: The phase with the highest peak.
        predicted: The process peak that the bundle's manifest predicts; None if not known.
        time: The time of each part. The sum is the time of the batch.
        train: The times of the training step (forward pass and backpropagation) with their spread.
    """

    profile: Profile
    memory: tuple[tuple[Part, int], ...]
    decisive: str | None
    predicted: int | None
    time: tuple[tuple[Part, float], ...]
    train: Duration

    @property
    def submodel(self) -> str:
        """The spec of the submodel."""
        return self.profile.submodel

    @property
    def peak(self) -> int | None:
        """The process peak in bytes, including Python and the runtime."""
        return sum(size for _, size in self.memory) if self.memory else None

    @property
    def seconds(self) -> float:
        """The time of one batch, including the frozen stages."""
        return sum(seconds for _, seconds in self.time)

    @property
    def unstable(self) -> tuple[str, ...]:
        """The phases whose times vary too much to be reliable."""
        names = self.profile.validity.unstable
        phases = (p for p in self.profile.phases if p.name in names and p.role in PARTS)
        return tuple(label(phase) for phase in phases)


@dataclass(frozen=True)
class Report:
    """The costs of submodels on one machine. `budget` limits the process peak, in bytes."""

    costs: tuple[Cost, ...]
    budget: int | None

    @property
    def machine(self) -> Machine:
        """The machine that all profiles were measured on."""
        return self.costs[0].profile.machine

    @property
    def highest(self) -> Cost | None:
        """The submodel with the highest process peak; None if no peak was measurable."""
        known = [cost for cost in self.costs if cost.peak]
        return max(known, key=lambda cost: cost.peak or 0, default=None)


def make_report(profiles: Sequence[Profile], budget: int | None = None) -> Report:
    """Make a report of profiles. Several profiles of one submodel are merged.

    Args:
        profiles: Profiles of one machine, one model and one method.
        budget: A limit of the process peak in bytes, or None.

    Returns:
        The costs of each submodel, in the order of the profiles.

    Raises:
        InputError: The profiles are of different machines, models or methods, or a profile lacks a
            phase. The message says what differs.
    """
    by_bundle: dict[tuple[str, str], list[Profile]] = {}
    for profile in profiles:
        refuse_other_machine(profiles[0], profile)
        refuse_other_method(profiles[0], profile)
        by_bundle.setdefault((profile.submodel, profile.structure), []).append(profile)
    names = [submodel for submodel, _ in by_bundle]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(
            "A report shows one model, but {submodel} was profiled for two models: give the "
            "profiles of one model.",
            code="report.several-models",
            submodel=twice,
        )
    return Report(tuple(cost_of(merge(same)) for same in by_bundle.values()), budget)


def cost_of(profile: Profile) -> Cost:
    """Add up the phases of `profile`. Raises InputError if a phase is missing."""
    memory, decisive = stacked_memory(profile)
    forward, train = profile.forward.median_s, profile.train.median_s
    stages = sum(phase.steady.median_s for phase in profile.of_role("stage"))
    parts: list[tuple[Part, float]] = [("stages", stages)] if profile.of_role("stage") else []
    # Noise can make the forward pass slower than the step that contains it. No part is negative.
    return Cost(
        profile=profile,
        memory=memory,
        decisive=decisive,
        predicted=predicted_peak(profile),
        time=(*parts, ("forward", min(forward, train)), ("backprop", max(train - forward, 0.0))),
        train=profile.train,
    )


PARTS: dict[str, Part] = {
    "stage": "stages",
    "forward": "forward",
    "step": "backprop",
    "train": "backprop",
}
"""The part of each phase. Initialising personal tensors happens once and is left out."""


def stacked_memory(profile: Profile) -> tuple[tuple[tuple[Part, int], ...], str | None]:
    """Bytes of each part, from the idle process to the highest peak, and the phase of that peak."""
    tops: dict[Part, tuple[int, Phase]] = {}
    idles = []
    for phase in profile.phases:
        if phase.memory is None or phase.memory.peak_bytes is None or phase.role not in PARTS:
            continue
        idles.append(phase.memory.idle_bytes or 0)
        part, peak = PARTS[phase.role], phase.memory.peak_bytes
        if part not in tops or peak > tops[part][0]:
            tops[part] = peak, phase
    if not tops:
        return (), None
    # The idle memory differs slightly between phases. Take the lowest, so that every part is
    # positive.
    below = min(idles)
    stack: list[tuple[Part, int]] = [("idle", below)]
    for part, (peak, _) in sorted(tops.items(), key=lambda item: item[1][0]):
        stack.append((part, max(peak - below, 0)))
        below = max(below, peak)
    return tuple(stack), label(max(tops.values(), key=lambda top: top[0])[1])


def predicted_peak(profile: Profile) -> int | None:
    """The process peak that the manifest predicts: the idle process plus the largest phase."""
    known = [
        phase.memory.idle_bytes + phase.predicted_bytes
        for phase in profile.phases
        if phase.role in PARTS
        and phase.memory is not None
        and phase.memory.idle_bytes is not None
        and phase.predicted_bytes is not None
    ]
    return max(known, default=None)


def as_json(report: Report) -> dict[str, Any]:
    """The document that `report --json` prints: bytes, and seconds for one batch."""
    highest = report.highest
    return {
        "version": REPORT_VERSION,
        "budget_bytes": report.budget,
        "peak": highest and {"submodel": highest.submodel, "phase": highest.decisive},
        "submodels": [
            {
                "submodel": cost.submodel,
                "peak_bytes": cost.peak,
                "predicted_peak_bytes": cost.predicted,
                "memory_bytes": dict(cost.memory),
                "time_s": dict(cost.time),
                "train_p10_s": cost.train.p10_s,
                "train_p90_s": cost.train.p90_s,
                "invalid": list(cost.profile.validity.invalid),
                "unstable": list(cost.profile.validity.unstable),
            }
            for cost in report.costs
        ],
    }


def over_budget(report: Report, cost: Cost) -> int | None:
    """Bytes by which the peak exceeds the budget; negative if it fits, None if not known."""
    return None if report.budget is None or cost.peak is None else cost.peak - report.budget
