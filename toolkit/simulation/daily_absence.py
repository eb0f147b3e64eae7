"""The absences of simulated clients: once a day, each client at its own time of the day."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

ROUNDING = 1e-9
"""If the rest of an absence is at most this share of a day, the absence is over, because such a
rest is a rounding error."""


@dataclass(frozen=True)
class Absence:
    """The absences of clients. All times are simulated seconds since the first round could open.

    A client that is away neither trains nor sends. When it comes back, it continues its work.

    Attributes:
        share: The share of each day for which a client is away, at least 0 and below 1.
        day_s: The length of a day.
        begins: For each client, when one of its absences begins. There is one on every day.

    Examples:
        >>> night = Absence(share=0.25, day_s=100, begins=[50])  # from 50 to 75, from 150 to 175
        >>> night.returns(client=0, now=60), night.returns(client=0, now=80)
        (75.0, 80)
        >>> night.ready(client=0, now=40, seconds=30)
        95.0
    """

    share: float
    day_s: float
    begins: Sequence[float]

    @classmethod
    def drawn(cls, share: float, day_s: float, clients: int, seed: int) -> Self:
        """Draw each client's time of day evenly, so that about `share` of all clients are away.

        `seed` alone decides the times.
        """
        # The third number separates these draws from those of the rounds.
        draw = np.random.default_rng([seed, 0, 3])
        return cls(share, day_s, draw.uniform(0, day_s, clients).tolist())

    @property
    def away_s(self) -> float:
        """How long an absence lasts."""
        return self.share * self.day_s

    def returns(self, client: int, now: float) -> float:
        """When `client` can work: at `now`, or after the absence if `client` is away at `now`."""
        left = self.away_s - self._since(client, now)
        return now + left if left > ROUNDING * self.day_s else now

    def ready(self, client: int, now: float, seconds: float) -> float:
        """When `client` has worked for `seconds`, if it starts at `now` or on its return."""
        start = self.returns(client, now)
        today = self.day_s - max(self._since(client, start), self.away_s)
        absences = math.ceil((seconds - today) / (self.day_s - self.away_s) - ROUNDING)
        return start + seconds + self.away_s * max(absences, 0)

    def _since(self, client: int, now: float) -> float:
        """Seconds since the last absence of `client` began, below `day_s`."""
        return (now - self.begins[client]) % self.day_s
