"""Chooses a device's submodel: the strongest submodel whose upper bounds are within the budgets.

The functions are pure: they take candidates and budgets and return a plan. The strength of a
submodel is the weight of its updates on the server (FedHM eq. 2). It is the number in the spec, or
the share of the global model that the submodel trains. If two submodels are equally strong, the
submodel that needs less memory is better. If the memory is also equal, the faster submodel is
better.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

Resource = Literal["memory", "step-time", "bandwidth"]
RESOURCES: tuple[Resource, ...] = ("memory", "step-time", "bandwidth")


class Figure(msgspec.Struct, frozen=True):
    """A predicted figure and its upper bound, in bytes or seconds."""

    value: float
    upper: float


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A submodel and the resources that it needs on the device.

    `strength` is in (0, 1]. `memory` is the process peak of the agent (bytes). `step` is the time
    of one batch (seconds; None if the device is not calibrated). `traffic` is the data that a round
    sends in both directions (bytes).
    """

    submodel: str
    strength: float
    memory: Figure
    step: Figure | None
    traffic: int

    def needs(self, resource: Resource) -> float | None:
        """The upper bound of the submodel's need of `resource`; None if unknown."""
        if resource == "memory":
            return self.memory.upper
        if resource == "bandwidth":
            return self.traffic
        return None if self.step is None else self.step.upper


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """The budgets of a device; None means no limit."""

    memory: float | None = None
    step: float | None = None
    traffic: float | None = None

    def of(self, resource: Resource) -> float | None:
        """The budget of `resource`; None if it has no limit."""
        return {"memory": self.memory, "step-time": self.step, "bandwidth": self.traffic}[resource]


class Excess(msgspec.Struct, frozen=True, kw_only=True):
    """A budget that a candidate exceeds. `needed` is the smallest budget that is large enough."""

    resource: Resource
    needed: float
    budget: float

    @property
    def over(self) -> float:
        """The excess over the budget."""
        return self.needed - self.budget


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate in a plan. It fits if it exceeds no budget. The worst excess comes first."""

    candidate: Candidate
    excesses: tuple[Excess, ...]

    @property
    def binding(self) -> Excess | None:
        """The largest excess relative to its budget; None if the candidate fits."""
        return self.excesses[0] if self.excesses else None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates, best first, and the best candidate that fits."""

    rows: tuple[Row, ...]
    chosen: Candidate | None

    @property
    def nearest(self) -> Row | None:
        """The candidate whose worst excess is smallest, for a plan in which nothing fits."""
        if self.chosen is not None or not self.rows:
            return None
        return min(self.rows, key=lambda row: excess_ratio(row.excesses[0]))


def plan(candidates: Iterable[Candidate], budgets: Budgets) -> Plan:
    """Choose a submodel for a device.

    A budget of time is ignored for candidates whose time is unknown; the caller must report that.

    Args:
        candidates: The submodels to choose from, in any order.
        budgets: The budgets of the device.

    Returns:
        The plan: all candidates, and the chosen one.
    """
    ordered = sorted(candidates, key=preference)
    rows = tuple(Row(candidate=c, excesses=excesses(c, budgets)) for c in ordered)
    fitting = [row.candidate for row in rows if not row.excesses]
    return Plan(rows=rows, chosen=fitting[0] if fitting else None)


def preference(candidate: Candidate) -> tuple[float, float, float, int, str]:
    """The sort key that puts the better candidate first."""
    step = candidate.step.upper if candidate.step is not None else 0.0
    memory = candidate.memory.upper
    # The spec decides last, so that the order of `candidates` has no influence.
    return (-candidate.strength, memory, step, candidate.traffic, candidate.submodel)


def excesses(candidate: Candidate, budgets: Budgets) -> tuple[Excess, ...]:
    """The budgets that `candidate` exceeds, the largest relative excess first."""
    # Bytes and seconds cannot be compared, but their ratios to the budgets can.
    exceeded = []
    for resource in RESOURCES:
        needed, budget = candidate.needs(resource), budgets.of(resource)
        if needed is not None and budget is not None and needed > budget:
            exceeded.append(Excess(resource=resource, needed=needed, budget=budget))
    return tuple(sorted(exceeded, key=excess_ratio, reverse=True))


def excess_ratio(excess: Excess) -> float:
    """The need divided by the budget."""
    return excess.needed / excess.budget
