"""Which clients of a round deliver an update, and how long the round takes in simulated time."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from profiles.cost_model.workload import Workload
from profiles.errors import ExportError
from profiles.progress import Report, silent
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.rounds.round_state import fewest_updates
from toolkit.planning.plan import find_workloads
from toolkit.planning.submodel_workloads import Workloads
from toolkit.simulation.partition import Parts
from toolkit.simulation.simulated_time import Clock, simulated_device
from toolkit.simulation.simulation_config import SimulationConfig

Chosen = Sequence[tuple[int, str]]
"""Clients, each with its submodel."""


class Turnout(NamedTuple):
    """The clients of a round.

    `present` deliver an update. `failed` ones and `late` ones only receive their submodels.
    `simulated_s` is the time of the round in seconds, None without a clock.
    """

    present: Chosen
    failed: Chosen = ()
    late: Chosen = ()
    simulated_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """Decides who delivers an update, as `serve` would.

    Attributes:
        clients: Number of all clients.
        seed: Of the failures.
        failure_rate: The probability that a client fails in a round.
        deadline_s: When a round closes with the updates that it has, in simulated seconds.
        quorum: The number of updates at which a round closes; None for all.
        seconds: The simulated time of a client with a submodel. None: nobody is late.
        min_updates: The fewest updates that a round closes with; None for the default.
    """

    clients: int
    seed: int
    failure_rate: float
    deadline_s: float
    quorum: int | None
    seconds: Callable[[int, str], float] | None
    min_updates: int | None = None

    def turnout(self, round_: int, chosen: Chosen) -> Turnout:
        """What becomes of the clients `chosen` for `round_`.

        A client's failure depends on the seed, the round and its number alone.
        """
        # The third number separates these draws from those of the sampling.
        luck = np.random.default_rng([self.seed, round_, 1]).random(self.clients)
        failed = [entry for entry in chosen if luck[entry[0]] < self.failure_rate]
        working = [entry for entry in chosen if luck[entry[0]] >= self.failure_rate]
        if self.seconds is None:
            return Turnout(working, failed)
        # Equal times are in random order, or a quorum would always take the first clients.
        arriving = sorted((self.seconds(*entry), luck[entry[0]], *entry) for entry in working)
        times = [time for time, *_ in arriving]
        fewest = fewest_updates(len(chosen), len(chosen), self.min_updates, self.quorum)
        count, closed = taken(times, len(failed), self.deadline_s, self.quorum, fewest)
        in_time = {client for *_, client, _ in arriving[:count]}
        return Turnout(
            present=[entry for entry in working if entry[0] in in_time],
            failed=failed,
            late=[entry for entry in working if entry[0] not in in_time],
            simulated_s=closed,
        )


def taken(
    times: Sequence[float], failed: int, deadline_s: float, quorum: int | None, fewest: int = 1
) -> tuple[int, float]:
    """How many updates a round takes, the earliest first, and when it closes, in seconds.

    It closes once it has `quorum` updates, or all. At the deadline it closes with the updates that
    it has. With less than `fewest` it opens again for as long, and what came stays, until the
    clients that did not fail have sent theirs. If all clients failed, it ends at the deadline.

    Args:
        times: When updates come, ascending, in seconds after the round opened.
        failed: Number of clients whose updates never come.
        deadline_s: The deadline in seconds after the round opened.
        quorum: The number of updates at which a round closes; None for all.
        fewest: The fewest updates that it closes with.

    Examples:
        >>> taken([3.0, 5.0, 90.0], failed=0, deadline_s=60, quorum=None)
        (2, 60)
        >>> taken([3.0, 5.0, 90.0], failed=0, deadline_s=60, quorum=2)
        (2, 5.0)
    """
    everyone = len(times) + failed
    enough = everyone if quorum is None else min(quorum, everyone)
    closes = deadline_s
    while (in_time := bisect_right(times, closes)) < min(fewest, len(times)):
        closes += deadline_s
    if enough <= in_time:
        return enough, times[enough - 1]
    return in_time, closes


def workloads(
    config: SimulationConfig, model: Federation, progress: Report = silent
) -> dict[str, Workload]:
    """The workload of each submodel, if the devices have profiles.

    Submodels that are not in the planner's cache are exported. That takes seconds each.

    Raises ExportError if a submodel cannot be exported.
    """
    if config.devices[0].profile is None or config.simulation.baseline:
        return {}
    source = Workloads(model.module, config.input_shape, config.training)
    known, impossible = find_workloads(source, dict.fromkeys(config.specs()), progress)
    for result in impossible:
        raise ExportError(
            "{submodel} cannot be exported, so simulated time cannot be computed: {reason} Set no "
            "`profile` for any kind.",
            code="simulation.no-workload",
            submodel=result.submodel,
            reason=result.reason,
        )
    return {result.submodel: result.work for result in known}


def attendance_of(
    config: SimulationConfig, parts: Parts, works: Mapping[str, Workload]
) -> Attendance:
    """Who fails and who is late, for clients whose samples are the rows `parts`."""
    kinds, table = config.kinds(), config.simulation
    clock = Clock(
        {kind.name: simulated_device(kind) for kind in config.devices if works},
        works,
        config.training,
        table.validation,
    )

    def seconds(client: int, spec: str) -> float:
        return clock.seconds(kinds[client].name, spec, len(parts[client]))

    return Attendance(
        clients=len(kinds),
        seed=table.seed,
        failure_rate=table.failure_rate,
        deadline_s=config.deadline_s,
        quorum=config.quorum,
        min_updates=config.min_updates,
        seconds=seconds if works else None,
    )
