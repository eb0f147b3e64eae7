"""Finds the updates that make a new model worse, by aggregating the round without some updates.

The limits of `update_limits.py` do not stop a device that sends the reverse of an honest change.
Held-out samples show the damage: the quality of the new model falls. The search then leaves out
groups of updates. If a group explains the fall, the search divides the group further, until few
updates are left that explain the fall together (delta debugging, Zeller and Hildebrandt 2002).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from device_agent.formats.protocol.fleet import Limited

FALL = 0.03
"""An accuracy that falls by less is never judged."""
ERRORS = 2.0
"""The accuracy must fall by this many standard errors, which few held-out samples make large."""
LOSS = 1.5
"""A loss above this many times the bar's is judged, too."""
LEAST_UPDATES = 3
"""Of fewer updates, none is left out: nothing says which one is harmful."""
MODELS = 3
"""The bar is the best quality of this many last models, so that it does not sink slowly."""
JUDGED = "without it the model is better on the held-out samples"
"""The reason why an update was left out begins with it if the new model was judged."""


class Judged(Protocol):
    """The quality of a model on held-out samples."""

    @property
    def accuracy(self) -> float | None:
        """The share of correct predictions; None for a regression."""

    @property
    def loss(self) -> float:
        """The mean loss."""


class Quality(NamedTuple):
    """The quality of an earlier model."""

    accuracy: float | None
    loss: float


@dataclass(frozen=True)
class Bar:
    """The quality that a new model should reach. If it does not, its updates are judged.

    Attributes:
        accuracy: The best accuracy of the last models; None for a regression.
        loss: The lowest loss of the last models. With an accuracy, at least the loss of the first
            model. None if this loss is not above 0: then a rise has no scale.
        samples: How many held-out samples there are.
    """

    accuracy: float | None
    loss: float | None
    samples: int

    @classmethod
    def of(cls, first: Judged, last: Sequence[Judged], samples: int) -> "Bar":
        """The bar after the models `last`. `first` is the model before any training."""
        accuracies = [own.accuracy for own in last if own.accuracy is not None]
        loss = min(own.loss for own in last)
        if accuracies:
            loss = max(loss, first.loss) if first.loss > 0 else 0.0
        return cls(max(accuracies, default=None), loss if loss > 0 else None, samples)

    def is_missed(self, quality: Judged, share: float = 1.0) -> bool:
        """Whether `quality` is below the bar by more than `share` of the allowed difference."""
        accuracy, loss = quality.accuracy, quality.loss
        if not math.isfinite(loss) or (self.loss is not None and loss > self.loss * LOSS**share):
            return True
        if self.accuracy is None or accuracy is None:
            return False
        variance = 2 * self.accuracy * (1 - self.accuracy) / max(self.samples, 1)
        return accuracy < self.accuracy - share * max(FALL, ERRORS * math.sqrt(variance))


def search_order(limited: Limited | None, kind: str) -> tuple[float, str]:
    """The key that sorts updates for `harmful`: the most limited first, equal ones by kind."""
    return -1.0 if limited is None else -limited.times, kind


def harmful(updates: Sequence[str], is_good: Callable[[frozenset[str]], bool]) -> list[str]:
    """Find few updates to leave out for a good model; empty if these are more than half.

    Args:
        updates: All updates. Updates that may be harmful together should be neighbours.
        is_good: Whether the model is good if these updates are left out.
    """
    if len(updates) < LEAST_UPDATES:
        return []
    good = cache(is_good)
    found = _needed(list(updates), frozenset(), good)
    few = 2 * len(found) <= len(updates)
    return found if few and good(frozenset(found)) else []


def _needed(
    group: list[str], out: frozenset[str], is_good: Callable[[frozenset[str]], bool]
) -> list[str]:
    """The members of `group` that must be left out, besides those in `out`.

    Leaving out the whole group makes the model good.
    """
    if len(group) == 1:
        return group
    one, other = group[: len(group) // 2], group[len(group) // 2 :]
    for half in (one, other):
        if is_good(out.union(half)):
            return _needed(half, out, is_good)
    first = _needed(one, out.union(other), is_good)
    return first + _needed(other, out.union(first), is_good)


def judged_text(without: Judged, whole: Judged) -> str:
    """Why an update was left out: the quality without it and with all updates."""
    return f"{JUDGED}: {_text(without)} in place of {_text(whole)}"


def _text(quality: Judged) -> str:
    # Both, because either may miss the bar while the other stays the same.
    loss = f"loss {quality.loss:.4g}"
    return loss if quality.accuracy is None else f"accuracy {quality.accuracy:.4f}, {loss}"
