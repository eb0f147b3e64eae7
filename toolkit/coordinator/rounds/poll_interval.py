"""Computes after how many seconds a waiting device asks again.

The time is short after a change of the rounds, and longer in a large fleet.
"""

import random
from collections.abc import Callable

from toolkit.coordinator.rounds.round_state import Rounds

REQUESTS_PER_S = 1250
"""The most requests in a second of all waiting devices together."""
SHORTEST_S = 0.25
LONGEST_S = 8.0
"""A device waits up to a fifth longer than it is told, so it learns of a new round within 10 s."""
SHARE = 0.1
"""A device asks again after this share of the time since the rounds last changed. So its waiting
extends a round by at most this share."""
JITTER = 0.2
"""Each time is up to this share shorter, so that the devices do not all ask together."""
_DRAWS = random.Random()
"""A separate random generator: recording a model fails if Python's global generator changes."""


class PollInterval:
    """Computes when a device asks again. `clock` gives seconds and never jumps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: tuple[str, int, int] | None = None
        self._since = clock()

    def seconds(self, rounds: Rounds) -> float:
        """Seconds until a device asks again. The time is shorter if `rounds` has just changed."""
        now, seen = self._clock(), (rounds.phase, rounds.round, rounds.places[0])
        if seen != self._seen:
            self._seen, self._since = seen, now
        soon = min(max(SHARE * (now - self._since), SHORTEST_S), LONGEST_S)
        return self.spread(max(soon, len(rounds.devices) / REQUESTS_PER_S))

    def spread(self, longest: float) -> float:
        """A time of at most `longest` seconds, so that the devices do not all ask together."""
        return round(longest * _DRAWS.uniform(1 - JITTER, 1), 3)
