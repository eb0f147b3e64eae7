"""Decides which clients of a round deliver an update, and how long the simulated round takes."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from profiles.cost_model.workload import Workload
from profiles.errors import ExportError
from profiles.progress import Report, silent
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.rounds.round_state import fewest_updates
from toolkit.planning.plan import find_workloads
from toolkit.planning.submodel_workloads import Workloads
from toolkit.simulation.daily_absence import Absence
from toolkit.simulation.partition import Parts
from toolkit.simulation.simulated_time import Clock, simulated_device
from toolkit.simulation.simulation_config import SimulationConfig

Chosen = Sequence[tuple[int, str]]
"""Clients, each with its submodel."""


class Turnout(NamedTuple):
    """The clients of a round.

    Clients in `present` deliver an update; all other clients only receive submodels. Clients in
    `not_needed` would have delivered an update after the round had reached its goal. Clients in
    `away` were asked, but were away during the whole round, so they did not receive a submodel.
    `simulated_s` is the simulated time of the round in seconds, or None if no time is simulated.
    `versions` has the model version from which each client of an asynchronous round trains; a
    client without an entry trains from the newest version.
    """

    present: Chosen
    failed: Chosen = ()
    late: Chosen = ()
    not_needed: Chosen = ()
    away: Chosen = ()
    simulated_s: float | None = None
    versions: Mapping[int, int] = MappingProxyType({})

    def by_version(self, newest: int) -> list[tuple[int, Chosen]]:
        """The clients in `present` by the version that they train from, in ascending order.

        `newest` is the newest version.
        """
        groups: dict[int, list[tuple[int, str]]] = {}
        for entry in self.present:
            groups.setdefault(self.versions.get(entry[0], newest), []).append(entry)
        return sorted(groups.items())


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """Decides which clients deliver an update, by the rules of `serve`.

    Attributes:
        clients: Number of all clients.
        seed: The seed of the failures.
        failure_rate: The probability that a client fails in a round.
        deadline_s: Simulated seconds after which a round closes with the updates that it has.
        quorum: The number of updates at which a round closes; None for all.
        seconds: Returns a client's simulated time for a submodel. None if no client is ever late.
        memory: Returns the memory that a client needs for a submodel, in bytes; None if unknown.
        min_updates: A round needs at least this many updates to close; None for the default.
        batches: Returns how many batches a client trains of a submodel, if `budget_s` limits them.
        has_goal: Whether `quorum` is the goal of a round. Such a round asks more clients than its
            goal, and only clients that are not away. Without times, updates come in random order.
        absence: When clients are away; None if never. Needs `seconds`.
    """

    clients: int
    seed: int
    failure_rate: float
    deadline_s: float
    quorum: int | None
    seconds: Callable[[int, str], float] | None
    memory: Callable[[int, str], float] | None = None
    min_updates: int | None = None
    has_goal: bool = False
    batches: Callable[[int, str], int] | None = None
    absence: Absence | None = None

    def peak_memory(self, turnout: Turnout) -> int | None:
        """The most memory that a client of a round needs, in bytes; None if unknown."""
        if self.memory is None:
            return None
        entries = (*turnout.present, *turnout.failed, *turnout.late)
        return round(max((self.memory(*entry) for entry in entries), default=0))

    def opens(self, closed: float) -> float:
        """When a round opens after the previous round has closed. Times are in simulated seconds.

        A round with a goal waits until a client is there. All other rounds open immediately.
        """
        if not self.has_goal:
            return closed
        return min(self.returns(client, closed) for client in range(self.clients))

    def candidates(self, closed: float) -> list[int]:
        """The clients that a round may ask if the previous round closed at `closed`."""
        everyone, opened = range(self.clients), self.opens(closed)
        return [
            client
            for client in everyone
            if not self.has_goal or self.returns(client, opened) == opened
        ]

    def returns(self, client: int, now: float) -> float:
        """When `client` can work: at `now`, or on its return. Times are in simulated seconds."""
        return now if self.absence is None else self.absence.returns(client, now)

    def arrives(self, client: int, spec: str, start: float) -> float:
        """When the update of `client` arrives if it may start at `start`, in simulated seconds."""
        seconds = 0.0 if self.seconds is None else self.seconds(client, spec)
        return (
            start + seconds if self.absence is None else self.absence.ready(client, start, seconds)
        )

    def turnout(self, round_: int, chosen: Chosen, closed: float = 0.0) -> Turnout:
        """Decide which of the clients `chosen` for `round_` deliver an update.

        Only the seed, the round and the client's number decide whether a client fails. `closed` is
        the time when the previous round closed, in simulated seconds.
        """
        luck = self.luck(round_)
        failed = [entry for entry in chosen if luck[entry[0]] < self.failure_rate]
        working = [entry for entry in chosen if luck[entry[0]] >= self.failure_rate]
        if self.seconds is None and not self.has_goal:
            return Turnout(working, failed)
        opened = self.opens(closed)
        # Order equal times at random. Otherwise a quorum would always take the first clients.
        arriving = sorted(
            (self.arrives(*entry, opened) - opened, luck[entry[0]], *entry) for entry in working
        )
        times = [time for time, *_ in arriving]
        fewest = fewest_updates(len(chosen), len(chosen), self.min_updates, self.quorum)
        count, lasted = taken(times, len(failed), self.deadline_s, self.quorum, fewest)
        in_time = {client for *_, client, _ in arriving[:count]}
        away = self._away(chosen, opened, opened + lasted)
        missing = [entry for entry in working if entry[0] not in in_time and entry not in away]
        enough = self.has_goal and count == self.quorum
        return Turnout(
            present=[entry for entry in working if entry[0] in in_time],
            failed=[entry for entry in failed if entry not in away],
            late=[] if enough else missing,
            not_needed=missing if enough else [],
            away=away,
            simulated_s=None if self.seconds is None else opened - closed + lasted,
        )

    def _away(self, chosen: Chosen, opened: float, closed: float) -> Chosen:
        """The clients of `chosen` that are away from `opened` to `closed`."""
        return [one for one in chosen if self.returns(one[0], opened) >= closed > opened]

    def luck(self, round_: int) -> np.ndarray:
        """A random number for each client of `round_`. Clients below `failure_rate` fail."""
        # The third number separates these draws from those of the sampling.
        return np.random.default_rng([self.seed, round_, 1]).random(self.clients)


def taken(
    times: Sequence[float], failed: int, deadline_s: float, quorum: int | None, fewest: int = 1
) -> tuple[int, float]:
    """Compute how many updates a round accepts, and how many seconds after its start it closes.

    The updates that arrive first are accepted.

    The round closes when it has `quorum` updates or all updates, otherwise at the deadline with the
    updates that it has. If these updates are fewer than `fewest`, and other clients have not
    failed, the deadline is extended by `deadline_s`, as often as needed. If all clients failed, the
    round closes at the first deadline.

    Args:
        times: When each update arrives, in seconds after the round opened, ascending.
        failed: Number of clients whose updates never come.
        deadline_s: The deadline in seconds after the round opened.
        quorum: The number of updates at which a round closes; None for all.
        fewest: The fewest updates with which the round closes.

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
    """The workload of each submodel; empty if the devices have no profiles.

    Exports submodels that are not in the planner's cache, which takes seconds for each.

    Raises ExportError if a submodel cannot be exported.
    """
    if config.devices[0].profile is None or config.simulation.baseline:
        return {}
    source = Workloads(model.module, config.input_shape, config.training)
    known, impossible = find_workloads(source, dict.fromkeys(config.specs()), progress)
    for result in impossible:
        raise ExportError(
            "{submodel} cannot be exported, so simulated time cannot be computed: {reason} To "
            "simulate without time, remove `profile` from all [[devices]].",
            code="simulation.no-workload",
            submodel=result.submodel,
            reason=result.reason,
        )
    return {result.submodel: result.work for result in known}


def attendance_of(
    config: SimulationConfig, parts: Parts, works: Mapping[str, Workload]
) -> Attendance:
    """Make the attendance for all clients. `parts` has the rows of each client in the data."""
    kinds, table = config.kinds(), config.simulation
    clock = Clock(
        {kind.name: simulated_device(kind) for kind in config.devices if works},
        works,
        config.training,
        max(table.validation, config.evaluation.share),
        config.budget_s,
    )

    def seconds(client: int, spec: str) -> float:
        return clock.seconds(kinds[client].name, spec, len(parts[client]))

    def batches(client: int, spec: str) -> int:
        return clock.trained_batches(kinds[client].name, spec, len(parts[client]))

    def memory(client: int, spec: str) -> float:
        return clock.memory(kinds[client].name, spec)

    return Attendance(
        clients=len(kinds),
        seed=table.seed,
        failure_rate=table.failure_rate,
        deadline_s=config.deadline_s,
        # With differential privacy, a round waits for all clients that it asks.
        quorum=None
        if config.device_privacy
        else config.updates_wanted(len(kinds)) or config.quorum,
        min_updates=config.min_updates,
        seconds=seconds if works else None,
        has_goal=config.clients_per_round is not None and config.device_privacy is None,
        batches=batches if works and config.budget_s is not None else None,
        memory=memory if works else None,
        absence=Absence.drawn(table.away, table.day_s, len(kinds), table.seed)
        if works and table.away
        else None,
    )
