"""The waits between two requests in which a device asks for work or for the state of its round."""

import random
from collections.abc import Callable

SHORTEST_S = 0.25
LONGEST_S = 2.0
LONGEST_ASKED_S = 300.0
"""The longest wait that a coordinator can ask for."""
LONGEST_RELEASE_S = 24 * 3600.0
"""The longest wait that a coordinator can ask for after the last round, when the device only waits
for a release."""
ROUND_CHECK_S = 60.0
"""How often a running training checks whether its round is still open."""
JITTER = 0.2
"""Each wait is up to this share longer or shorter, so that not all devices ask at the same time."""
_DRAWS = random.Random()
"""A separate generator: Python's own random state must not change while a model is recorded."""


def jittered(seconds: float) -> float:
    """Make `seconds` randomly longer or shorter, by a share of up to JITTER."""
    return seconds * _DRAWS.uniform(1 - JITTER, 1 + JITTER)


class Polling:
    """Waits between two requests. The coordinator can set the length of a wait.

    If the coordinator does not set it, each wait is twice as long as the previous wait. Polling
    starts fast, because in a fast fleet the next round begins soon, and becomes slower.
    """

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep
        self.restart()

    def restart(self) -> None:
        """Start again with the shortest wait."""
        self._next_s = SHORTEST_S

    def wait(self, asked_s: float = 0) -> None:
        """Wait before the next request. If `asked_s` is positive, wait for this many seconds."""
        if asked_s > 0:
            self._sleep(min(asked_s, LONGEST_ASKED_S))
            return
        self._sleep(self._next_s)
        self._next_s = min(2 * self._next_s, LONGEST_S)

    def wait_for_release(self, asked_s: float) -> None:
        """Wait for `asked_s` seconds before the next request after the last round."""
        self._sleep(min(asked_s, LONGEST_RELEASE_S))
