"""Detects a global model that gets worse: from round to round, or slowly over several rounds."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from device_agent.formats.protocol.fleet import RoundResult
from toolkit.coordinator.rounds.compared_rounds import compared

FALLS = 3
"""A warning needs this many falls in a row. Fewer can be due to the choice of devices."""


BEHIND = 5
"""Another reason for a warning: none of this many newest models comes near the best earlier
model."""
WINDOW = 20
"""Only this many newest models are searched for the best model, so that a warning ends."""
POINTS = 0.03
"""An accuracy is near another if it is lower by at most this much."""
RISE = 0.1
"""In a regression, a loss is near another if it is higher by at most this share."""


def falling(results: Sequence[RoundResult]) -> str | None:
    """Return a warning if the quality on held-out samples falls. Otherwise return None.

    The quality falls in two cases: it fell in each of the last FALLS rounds, or all BEHIND newest
    models are clearly worse than the best earlier model. The quality may rise in single rounds in
    between. The quality is the accuracy. In a regression, the quality falls if the loss rises.
    Without held-out samples, the quality on the devices is used, which is not known yet for the
    last result.
    """
    last = compared(results)[-WINDOW:]
    accuracies = [accuracy for _, (accuracy, _) in last if accuracy is not None]
    if len(accuracies) == len(last):
        since = _since(accuracies, lambda best: best - POINTS)
    else:
        since = _since([-loss for _, (_, loss) in last], lambda best: best - RISE * abs(best))
    if since is None:
        return None
    first, newest = last[since][0], last[-1][0]
    what = "quality on the devices" if newest.loss is None else "held-out quality"
    how = f"fell {FALLS} rounds in a row"
    if since < len(last) - 1 - FALLS:
        how = f"has not come near that of round {first.round} for {BEHIND} rounds"
    return (
        f"The {what} {how}: {first.quality()} after round {first.round}, "
        f"{newest.quality()} after round {newest.round}. `edgetailor rounds` lists the kept "
        "models, `edgetailor go-back` goes back to one."
    )


def _since(quality: Sequence[float], near: Callable[[float], float]) -> int | None:
    """The index of the model since which the quality falls; None if it does not fall.

    `near` is the lowest quality that is near another.
    """
    newest = quality[-FALLS - 1 :]
    if len(newest) > FALLS and all(after < before for before, after in pairwise(newest)):
        return len(quality) - 1 - FALLS
    earlier = quality[:-BEHIND]
    if not earlier:
        return None
    best = max(earlier)
    return quality.index(best) if max(quality[-BEHIND:]) < near(best) else None
