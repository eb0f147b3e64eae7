"""Detects a global model that gets worse from round to round."""

from collections.abc import Sequence
from itertools import pairwise

from device_agent.formats.protocol.fleet import RoundResult
from toolkit.coordinator.rounds.compared_rounds import compared

FALLS = 3
"""A warning needs this many falls in a row. Fewer can come from the choice of a round's devices."""


def falling(results: Sequence[RoundResult]) -> str | None:
    """Return a warning if the quality on held-out samples fell in each of the last FALLS rounds.

    Otherwise return None. The quality is the accuracy. In a regression, the quality falls if the
    loss rises. Without held-out samples, it is the quality on the devices, which is not known yet
    for the last result.
    """
    last = compared(results)[-FALLS - 1 :]
    if len(last) <= FALLS:
        return None
    accuracies = [accuracy for _, (accuracy, _) in last if accuracy is not None]
    quality = accuracies if len(accuracies) == len(last) else [-loss for _, (_, loss) in last]
    if not all(after < before for before, after in pairwise(quality)):
        return None
    first, newest = last[0][0], last[-1][0]
    what = "quality on the devices" if newest.loss is None else "held-out quality"
    return (
        f"The {what} fell {FALLS} rounds in a row: {first.quality()} after round {first.round}, "
        f"{newest.quality()} after round {newest.round}. `edgetailor rounds` lists the kept "
        "models, `edgetailor go-back` goes back to one."
    )
