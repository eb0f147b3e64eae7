"""The scores and costs of a sweep's simulations, and the best simulation within limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from profiles.errors import InputError
from profiles.text_formatting import format_bytes
from toolkit.simulation.comparison import Row, Spread, compare, sent_bytes, spread
from toolkit.simulation.sweeps.grid import SEEDS
from toolkit.simulation.sweeps.sweep import Run
from toolkit.toml_files import Values

Cost: TypeAlias = Literal["bytes", "traffic", "memory", "simulated_s"]
"""Bytes of all clients; bytes of a device in a round; bytes of its memory; simulated seconds."""
LAST = 5
"""The score of a simulation is the mean of this many last rounds, because single rounds vary
much."""


@dataclass(frozen=True)
class Limits:
    """The most that a device may need; None means no limit.

    Attributes:
        traffic: Bytes of a device in a round, in both directions.
        memory: Bytes of the agent's peak, as the planner predicts it.
    """

    traffic: int | None = None
    memory: int | None = None

    @property
    def known(self) -> dict[Cost, int]:
        """The limits that are given."""
        limits: dict[Cost, int | None] = {"traffic": self.traffic, "memory": self.memory}
        return {cost: limit for cost, limit in limits.items() if limit is not None}

    def text(self) -> str:
        """The limits as text."""
        units: dict[Cost, str] = {"traffic": "for a device and round", "memory": "of memory"}
        return " and ".join(
            f"{format_bytes(limit)} {units[cost]}" for cost, limit in self.known.items()
        )

    def check(self, runs: Sequence[Run]) -> None:
        """Raise InputError if the memory is limited, but the memory of a run will not be known."""
        for run in runs:
            unknown = run.config.devices[0].profile is None or run.config.simulation.baseline
            if self.memory is not None and unknown:
                raise InputError(
                    "--most-memory needs a prediction of memory: give every kind of devices a "
                    "`profile`, and set no `baseline`.",
                    code="simulation.no-memory",
                )


@dataclass(frozen=True)
class Point:
    """Simulations of a sweep that differ at most in their seeds.

    Attributes:
        values: Their values, without the seeds if there are several simulations.
        row: Their results.
    """

    values: Values
    row: Row

    @property
    def score(self) -> Spread:
        """The mean accuracy of the last rounds; the loss of a regression."""
        return self.row.mean_of_last(LAST)

    @property
    def quality(self) -> float:
        """The mean score; the higher, the better. Minus infinity if the score is NaN."""
        mean = self.score.mean
        if mean != mean:
            return float("-inf")
        return -mean if self.row.judged_by_loss else mean

    @property
    def costs(self) -> dict[Cost, float]:
        """The known costs."""
        row = self.row
        known: dict[Cost, float | None] = {
            "bytes": row.sent.mean,
            "traffic": traffic_of(row),
            "memory": row.memory,
            "simulated_s": row.simulated_s and row.simulated_s.mean,
        }
        return {cost: value for cost, value in known.items() if value is not None}

    def keeps(self, limits: Limits) -> bool:
        """Whether no cost is above its limit."""
        costs = self.costs
        return all(cost in costs and costs[cost] <= most for cost, most in limits.known.items())


def traffic_of(row: Row) -> float:
    """The mean bytes that a device receives and sends in a round, if it takes part in the round."""
    shares = []
    for run in row.histories:
        devices = sum(own.took_part for own in run)
        shares.append(sent_bytes(run)[-1] / max(1, devices))
    return spread(shares).mean


def points_of(runs: Sequence[Run]) -> list[Point]:
    """The results of `runs`, which are finished."""
    by_folder = {run.folder: run.values for run in runs}
    points = []
    for row in compare([*by_folder]):
        values: Mapping[str, object] = by_folder[row.folders[0]]
        if len(row.folders) > 1:
            values = {key: value for key, value in values.items() if key not in SEEDS}
        points.append(Point(values, row))
    return points


def best_of(points: Sequence[Point], limits: Limits) -> Point | None:
    """The point with the best score within `limits`; None if no point keeps them.

    If several points are equally good, this is the point with the fewest bytes.
    """
    within = [point for point in points if point.keeps(limits)]
    return max(within, key=lambda point: (point.quality, -point.costs["bytes"]), default=None)


def front(points: Sequence[Point], cost: Cost) -> list[Point]:
    """The Pareto front: no other point is as good at a lower cost, or better at the same cost.

    The points are sorted by cost, ascending.
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda own: (own.costs[cost], -own.quality)):
        if not kept or point.quality > kept[-1].quality:
            kept.append(point)
    return kept
