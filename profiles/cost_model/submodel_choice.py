"""Which submodel a device gets: the strongest whose upper bounds are within every budget.

Pure: candidates and budgets in, a plan out. How strong a submodel is, is the weight that the server
gives its updates (FedHM eq. 2): what its size says, or the share of the global model that it
trains. Of equally strong ones the one that needs least memory, then least time, is better.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

Resource = Literal["memory", "step-time", "bandwidth"]
RESOURCES: tuple[Resource, ...] = ("memory", "step-time", "bandwidth")


class Figure(msgspec.Struct, frozen=True):
    """A predicted figure and its upper bound; bytes or seconds."""

    value: float
    upper: float


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A submodel and what it needs of the device.

    `strength` is in (0, 1]. `memory` is the peak of the agent's process (bytes), `step` the time of
    one batch (seconds; None where the device was not calibrated), `traffic` what a round sends
    there and back (bytes).
    """

    submodel: str
    strength: float
    memory: Figure
    step: Figure | None
    traffic: int

    def needs(self, resource: Resource) -> float | None:
        """The upper bound of what it takes of `resource`; None where that is not known."""
        if resource == "memory":
            return self.memory.upper
        if resource == "bandwidth":
            return self.traffic
        return None if self.step is None else self.step.upper


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """What a device may spend; None: as much as it likes."""

    memory: float | None = None
    step: float | None = None
    traffic: float | None = None

    def of(self, resource: Resource) -> float | None:
        """The budget of `resource`."""
        return {"memory": self.memory, "step-time": self.step, "bandwidth": self.traffic}[resource]


class Excess(msgspec.Struct, frozen=True, kw_only=True):
    """A budget that a candidate exceeds; `needed` would admit it."""

    resource: Resource
    needed: float
    budget: float

    @property
    def over(self) -> float:
        """By how much."""
        return self.needed - self.budget


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate in a plan; it fits where nothing is exceeded. The worst excess is first."""

    candidate: Candidate
    excesses: tuple[Excess, ...]

    @property
    def binding(self) -> Excess | None:
        """The budget that it exceeds by most, relative to the budget."""
        return self.excesses[0] if self.excesses else None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates, best first, and the best that fits."""

    rows: tuple[Row, ...]
    chosen: Candidate | None

    @property
    def nearest(self) -> Row | None:
        """Where nothing fits: the candidate whose worst excess is least."""
        if self.chosen is not None or not self.rows:
            return None
        return min(self.rows, key=lambda row: excess_ratio(row.excesses[0]))


def plan(candidates: Iterable[Candidate], budgets: Budgets) -> Plan:
    """The plan for a device with these `budgets`; the order of `candidates` is of no matter.

    A budget of time does not bind where no time could be predicted: the caller says so.
    """
    ordered = sorted(candidates, key=preference)
    rows = tuple(Row(candidate=c, excesses=excesses(c, budgets)) for c in ordered)
    fitting = [row.candidate for row in rows if not row.excesses]
    return Plan(rows=rows, chosen=fitting[0] if fitting else None)


def preference(candidate: Candidate) -> tuple[float, float, float, int, str]:
    """Sorts the better candidate first."""
    step = candidate.step.upper if candidate.step is not None else 0.0
    memory = candidate.memory.upper
    return (-candidate.strength, memory, step, candidate.traffic, candidate.submodel)


def excesses(candidate: Candidate, budgets: Budgets) -> tuple[Excess, ...]:
    """The budgets that `candidate` exceeds, worst first."""
    found = []
    for resource in RESOURCES:
        needed, budget = candidate.needs(resource), budgets.of(resource)
        if needed is not None and budget is not None and needed > budget:
            found.append(Excess(resource=resource, needed=needed, budget=budget))
    return tuple(sorted(found, key=excess_ratio, reverse=True))


def excess_ratio(excess: Excess) -> float:
    """What is needed over what there is."""
    return excess.needed / excess.budget
