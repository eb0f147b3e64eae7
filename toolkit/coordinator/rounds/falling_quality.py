"""Detects a global model that gets worse from round to round."""

from collections.abc import Sequence
from itertools import pairwise

from device_agent.formats.protocol import RoundResult

FALLS = 3
"""A warning needs this many falls in a row. Fewer can come from the choice of a round's devices."""


def falling(results: Sequence[RoundResult]) -> str | None:
    """Return a warning if the quality on held-out samples fell in each of the last FALLS rounds.

    Otherwise return None. The quality is the accuracy. In a regression, the quality falls if the
    loss rises.
    """
    last = results[-FALLS - 1 :]
    if len(last) <= FALLS:
        return None
    accuracies = [result.accuracy for result in last if result.accuracy is not None]
    quality = accuracies if len(accuracies) == len(last) else [-result.loss for result in last]
    if not all(after < before for before, after in pairwise(quality)):
        return None
    return (
        f"The held-out quality fell {FALLS} rounds in a row: {last[0].quality()} after round "
        f"{last[0].round}, {last[-1].quality()} after round {last[-1].round}. `edgetailor rounds` "
        "lists the kept models, `edgetailor rollback` goes back to one."
    )
