"""The time that a measurement may take."""

import time
from collections.abc import Callable, Iterator


class Budget:
    """The time for a measurement.

    Args:
        length_s: The time in seconds, from now on.
        clock: Returns the time in seconds.
    """

    def __init__(self, length_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + length_s

    @property
    def left_s(self) -> float:
        """Time left in seconds; negative when it is over."""
        return self._end - self._clock()

    def runs(self, limits: tuple[int, int], share: float) -> Iterator[int]:
        """Yield the number of each run until the runs have used the share `share` of the time left.

        `limits` are the smallest and the largest number of runs. If no time is left, there is one
        run.
        """
        fewest, most = limits
        end_s = (1 - share) * self.left_s
        for done in range(most):
            left_s = self.left_s
            if (done and left_s <= 0) or (done >= fewest and left_s <= end_s):
                return
            yield done
