"""The timetable of asynchronous rounds: which updates make each version of the model, and when.

If fewer than `concurrency` clients train, a client that is free and not away trains the newest
model. Its update arrives after its simulated time. The first `buffer_size` updates make the next
version, which counts as a round; clients that still train go on. After its update was taken, a
client waits for the next version, so no client is in a version twice.

Times do not depend on what clients learn, so the timetable is computed without training. A
simulation that continues computes it again.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from toolkit.coordinator.federation_file.round_keys import MAX_STALENESS
from toolkit.coordinator.rounds.round_state import fewest_updates
from toolkit.simulation.attendance import Attendance, Turnout
from toolkit.simulation.simulation_config import SimulationConfig


class Flight(NamedTuple):
    """A client that trains. The order is by time of arrival; equal times have a random order.

    Attributes:
        arrives: When the update arrives, in simulated seconds since the first round opened.
        luck: A random number.
        client: The client.
        version: The version that it trains from, counted from 0.
        fails: Whether the client stops at this time without sending an update.
    """

    arrives: float
    luck: float
    client: int
    version: int
    fails: bool


@dataclass
class _Version:
    """The next version, while its updates arrive.

    Clients in `waiting` start as soon as there is a place. Clients in `returning` are away; the
    time of each client is its return.
    """

    waiting: deque[int]
    returning: list[tuple[float, int]] = field(default_factory=list)
    taken: list[Flight] = field(default_factory=list)
    failed: list[Flight] = field(default_factory=list)
    late: list[Flight] = field(default_factory=list)


class Timetable:
    """Decides which clients deliver an update to each version.

    Args:
        attendance: The times of clients, their failures, and the deadline of a round.
        specs: The submodel of each client.
        concurrency: How many clients train at a time.
        buffer_size: How many updates make a version.
        max_staleness: An update of a version that is older than this many versions is refused.

    Examples:
        >>> one_fast = Attendance(
        ...     clients=3, seed=0, failure_rate=0, deadline_s=60, quorum=2,
        ...     seconds=lambda client, spec: [1.0, 4.0, 4.0][client],
        ... )
        >>> timetable = Timetable(one_fast, ["full"] * 3, concurrency=3, buffer_size=2)
        >>> [timetable.turnout(round_).simulated_s for round_ in (1, 2, 3)]
        [4.0, 1.0, 3.0]
    """

    def __init__(
        self,
        attendance: Attendance,
        specs: Sequence[str],
        concurrency: int,
        buffer_size: int,
        max_staleness: int = MAX_STALENESS,
    ) -> None:
        self._attendance, self._specs = attendance, specs
        self._concurrency, self._buffer_size = concurrency, buffer_size
        self.max_staleness = max_staleness
        self._flights: list[Flight] = []
        self._now = 0.0
        self._turnouts = self._computed()
        self._rounds = 0
        self._newest = Turnout(())

    def turnout(self, round_: int) -> Turnout:
        """The clients of `round_`, which makes the version with the number `round_`.

        Ask for rounds in ascending order. `late` has clients whose updates were refused because
        they were too old.
        """
        while self._rounds < round_:
            self._newest = next(self._turnouts)
            self._rounds += 1
        return self._newest

    def _computed(self) -> Iterator[Turnout]:
        fewest = fewest_updates(
            self._concurrency, self._concurrency, self._attendance.min_updates, self._buffer_size
        )
        for version in count():
            opened = self._now
            made = self._filled(version, fewest)
            yield Turnout(
                present=sorted(self._clients(made.taken)),
                failed=self._clients(made.failed),
                late=self._clients(made.late),
                simulated_s=self._now - opened,
                versions={f.client: f.version for f in made.taken},
            )

    def _clients(self, flights: Sequence[Flight]) -> list[tuple[int, str]]:
        return [(flight.client, self._specs[flight.client]) for flight in flights]

    def _filled(self, version: int, fewest: int) -> _Version:
        """Let time pass until the updates after `version` are complete, or no client trains."""
        luck = self._attendance.luck(version + 1)
        # The third number separates these draws from those of the failures.
        draw = np.random.default_rng([self._attendance.seed, version + 1, 2])
        busy = {flight.client for flight in self._flights}
        order = draw.permutation(len(self._specs)).tolist()
        made = _Version(deque(client for client in order if client not in busy))
        closes = self._now + self._attendance.deadline_s
        self._start(made, version, luck)
        while len(made.taken) < self._buffer_size and (self._flights or made.returning):
            arrives = self._flights[0].arrives if self._flights else math.inf
            returns = made.returning[0][0] if made.returning else math.inf
            if min(arrives, returns) > closes:
                self._now = closes
                if len(made.taken) >= fewest:
                    break
                closes += self._attendance.deadline_s
                continue
            self._now = min(arrives, returns)
            if arrives <= returns:
                self._land(made, version)
            self._start(made, version, luck)
        return made

    def _land(self, made: _Version, version: int) -> None:
        """Take the update that arrives now, if it comes and is not too old."""
        flight = heapq.heappop(self._flights)
        too_old = version - flight.version > self.max_staleness
        (made.failed if flight.fails else made.late if too_old else made.taken).append(flight)
        if flight.version < version and (flight.fails or too_old):
            made.waiting.append(flight.client)

    def _start(self, made: _Version, version: int, luck: np.ndarray) -> None:
        """Let clients train the newest version, as many as there are places."""
        while made.returning and made.returning[0][0] <= self._now:
            made.waiting.append(heapq.heappop(made.returning)[1])
        while made.waiting and len(self._flights) < self._concurrency:
            client = made.waiting.popleft()
            returns = self._attendance.returns(client, self._now)
            if returns > self._now:
                heapq.heappush(made.returning, (returns, client))
                continue
            arrives = self._attendance.arrives(client, self._specs[client], self._now)
            fails = bool(luck[client] < self._attendance.failure_rate)
            heapq.heappush(self._flights, Flight(arrives, luck[client], client, version, fails))


def timetable_of(config: SimulationConfig, attendance: Attendance) -> Timetable:
    """The timetable of a file with `mode = "async"`. All clients have the times of `attendance`."""
    specs, buffer_size = config.specs(), config.buffer_size
    assert buffer_size is not None  # the file refuses this mode without `buffer_size`
    concurrency = max(1, round(config.simulation.participation * len(specs)))
    return Timetable(attendance, specs, concurrency, buffer_size, config.oldest)
