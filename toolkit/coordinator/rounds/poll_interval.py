"""When a waiting device asks again: often near the opening of a round, rarely in a large fleet."""

import random
from collections.abc import Callable

from toolkit.coordinator.rounds.round_state import Rounds

REQUESTS_PER_S = 1250
"""What a whole fleet that waits may ask in a second."""
SHORTEST_S = 0.25
LONGEST_S = 8.0
"""A device adds up to a fifth, and learns of a new round within 10 s."""
SHARE = 0.1
"""Of the time since the rounds last changed, so that no device adds more to a round's duration."""
JITTER = 0.2
"""Each time is up to this share shorter, so that a fleet does not ask all at once."""
_DRAWS = random.Random()
"""A generator of its own: a model whose recording sees Python's own one move would be refused."""


class PollInterval:
    """Says after how many seconds a device asks again. `clock` gives seconds and never jumps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: tuple[str, int, int] | None = None
        self._since = clock()

    def seconds(self, rounds: Rounds) -> float:
        """The time for one device. It begins short again whenever `rounds` have moved on."""
        now, seen = self._clock(), (rounds.phase, rounds.round, rounds.places[0])
        if seen != self._seen:
            self._seen, self._since = seen, now
        soon = min(max(SHARE * (now - self._since), SHORTEST_S), LONGEST_S)
        longest = max(soon, len(rounds.devices) / REQUESTS_PER_S)
        return round(longest * _DRAWS.uniform(1 - JITTER, 1), 3)
