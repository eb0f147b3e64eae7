"""What a report shows of each submodel: memory and time of one batch, by phase.

As Table 8 of EmbracingFL: feed-forward, its frozen stages apart, and backpropagation.
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
    """One submodel. Memory in bytes, time in seconds for one batch.

    `memory` is stacked: each part is what its phase needs beyond the parts before it, so that their
    sum is the process peak; empty where it was not measurable. `decisive` is the phase at the peak.
    `time` is stacked too; `train` is the training step's spread, which the forward pass and
    backpropagation are parts of.
    """

    profile: Profile
    memory: tuple[tuple[Part, int], ...]
    decisive: str | None
    predicted: int | None
    time: tuple[tuple[Part, float], ...]
    train: Duration

    @property
    def submodel(self) -> str:
        """Its spec."""
        return self.profile.submodel

    @property
    def peak(self) -> int | None:
        """Process peak, bytes: Python and runtime with it."""
        return sum(size for _, size in self.memory) if self.memory else None

    @property
    def seconds(self) -> float:
        """Time of one batch, frozen stages included."""
        return sum(seconds for _, seconds in self.time)

    @property
    def unstable(self) -> tuple[str, ...]:
        """The phases of `time` that vary too much to be relied on."""
        names = self.profile.validity.unstable
        phases = (p for p in self.profile.phases if p.name in names and p.role in PARTS)
        return tuple(label(phase) for phase in phases)


@dataclass(frozen=True)
class Report:
    """Submodels on one machine. `budget` is for the process peak, bytes."""

    costs: tuple[Cost, ...]
    budget: int | None

    @property
    def machine(self) -> Machine:
        """Where all of it was measured."""
        return self.costs[0].profile.machine

    @property
    def highest(self) -> Cost | None:
        """The submodel with the highest process peak; None where none was measurable."""
        known = [cost for cost in self.costs if cost.peak]
        return max(known, key=lambda cost: cost.peak or 0, default=None)


def make_report(profiles: Sequence[Profile], budget: int | None = None) -> Report:
    """A report on `profiles`; several of one submodel become one.

    Raises InputError naming what differs where they are of several machines or models, or were not
    measured alike.
    """
    by_bundle: dict[tuple[str, str], list[Profile]] = {}
    for profile in profiles:
        refuse_other_machine(profiles[0], profile)
        refuse_other_method(profiles[0], profile)
        by_bundle.setdefault((profile.submodel, profile.structure), []).append(profile)
    names = [submodel for submodel, _ in by_bundle]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(
            f"A report shows one model, but {twice} was profiled for two models: give the "
            "profiles of one model.",
            code="report.several-models",
            submodel=twice,
        )
    return Report(tuple(cost_of(merge(same)) for same in by_bundle.values()), budget)


def cost_of(profile: Profile) -> Cost:
    """What the phases of `profile` add up to. Raises InputError where one is not there."""
    memory, decisive = stacked_memory(profile)
    forward, train = profile.forward.median_s, profile.train.median_s
    stages = sum(phase.steady.median_s for phase in profile.of_role("stage"))
    parts: list[tuple[Part, float]] = [("stages", stages)] if profile.of_role("stage") else []
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
"""What a phase's memory is drawn as. Filling personal tensors happens once, and is left out."""


def stacked_memory(profile: Profile) -> tuple[tuple[tuple[Part, int], ...], str | None]:
    """Parts from the idle process up, lowest peak first, and what the phase at the peak is."""
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
    below = min(idles)
    stack: list[tuple[Part, int]] = [("idle", below)]
    for part, (peak, _) in sorted(tops.items(), key=lambda item: item[1][0]):
        stack.append((part, max(peak - below, 0)))
        below = max(below, peak)
    return tuple(stack), label(max(tops.values(), key=lambda top: top[0])[1])


def predicted_peak(profile: Profile) -> int | None:
    """What the manifest predicts for the process peak: the idle process and the largest phase."""
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
    """One object: sizes in bytes, times in seconds for one batch."""
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
    """Bytes by which the peak is above the budget, at most 0 within it; None if not known."""
    return None if report.budget is None or cost.peak is None else cost.peak - report.budget
