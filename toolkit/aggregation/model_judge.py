"""Finds the updates that make a new model worse, by aggregating the round without some updates.

The limits of `update_limits.py` do not stop a device that sends the reverse of an honest change.
Held-out samples show the damage: the quality of the new model falls. The search then leaves out
groups of updates. If a group explains the fall, the search divides the group further, until few
updates are left that explain the fall together (delta debugging, Zeller and Hildebrandt 2002).

Hostile devices can also cancel the progress of the others. Then nothing falls, but the quality
stays as it is. So updates are left out, too, if the others make the accuracy rise clearly above all
earlier models while the whole round does not. Most models that do not rise are just trained, and
nothing helps. So this search is short, and the longer the stall, the rarer it is. It is most
frequent while the accuracy rises slowly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol

from device_agent.formats.protocol.fleet import Limited

FALL = 0.03
"""An accuracy that falls by less is never judged."""
ERRORS = 2.0
"""The accuracy must fall by this many standard errors, which few held-out samples make large."""
LOSS = 1.5
"""A loss above this many times the bar's is judged, too."""
STALL_SAMPLES = 200
"""With fewer held-out samples no stall is judged: a rise would hardly be told from chance."""
STALL_SHARE = 0.3
"""If more than this share of a stalled round would have to be left out, nothing is. The rise may
then be chance: in early rounds, a few trainings decide."""
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


class Aim(NamedTuple):
    """What a model without some updates of its round must reach.

    `is_reached` says whether it does. If `stalled`, the whole model is not worse than earlier ones.
    """

    is_reached: Callable[[Judged], bool]
    stalled: bool


@dataclass(frozen=True)
class Bar:
    """The quality that a new model should reach. If it does not, its updates are judged.

    Attributes:
        accuracy: The best accuracy of the last models; None for a regression.
        loss: The lowest loss of the last models. With an accuracy, at least the loss of the first
            model. None if this loss is not above 0: then a rise has no scale.
        samples: How many held-out samples there are.
        best: The best accuracy of all models; None for a regression.
        age: How many models there are since the accuracy last rose clearly, with the new one.
    """

    accuracy: float | None
    loss: float | None
    samples: int
    best: float | None = None
    age: int = 1

    @classmethod
    def of(cls, first: Judged, models: Sequence[Judged], samples: int) -> "Bar":
        """The bar after `models`, the newest last. `first` is the model before any training."""
        every = [own.accuracy for own in models if own.accuracy is not None]
        accuracies, loss = every[-MODELS:], min(own.loss for own in models[-MODELS:])
        if accuracies:
            loss = max(loss, first.loss) if first.loss > 0 else 0.0
        best = max(every, default=None)
        bar = cls(max(accuracies, default=None), loss if loss > 0 else None, samples, best)
        if best is None:
            return bar
        risen = next(n for n, own in enumerate(every) if own > best - bar.difference(best))
        return replace(bar, age=len(every) - risen)

    def difference(self, accuracy: float) -> float:
        """How far another accuracy must be from `accuracy` to be clearly different."""
        variance = 2 * accuracy * (1 - accuracy) / max(self.samples, 1)
        return max(FALL, ERRORS * math.sqrt(variance))

    def aim(self, whole: Judged) -> Aim | None:
        """What to reach without some updates; None if `whole`, with all of them, is to stay."""
        if self.is_missed(whole):
            return Aim(lambda quality: not self.is_missed(quality, share=0.5), stalled=False)
        if self.best is None or self.samples < STALL_SAMPLES or self.has_risen(whole):
            return None
        now = self.age & (self.age - 1) == 0  # 1, 2, 4, 8 and so on
        can_rise = self.best + self.difference(self.best) <= 1
        return Aim(self.has_risen, stalled=True) if now and can_rise else None

    def has_risen(self, quality: Judged) -> bool:
        """Whether the accuracy is clearly above that of all earlier models."""
        if self.best is None or quality.accuracy is None or self.is_missed(quality):
            return False
        return quality.accuracy >= self.best + self.difference(self.best)

    def is_missed(self, quality: Judged, share: float = 1.0) -> bool:
        """Whether `quality` is below the bar by more than `share` of the allowed difference."""
        accuracy, loss = quality.accuracy, quality.loss
        if not math.isfinite(loss) or (self.loss is not None and loss > self.loss * LOSS**share):
            return True
        if self.accuracy is None or accuracy is None:
            return False
        return accuracy < self.accuracy - share * self.difference(self.accuracy)


def search_order(limited: Limited | None, kind: str) -> tuple[float, str]:
    """The key that sorts updates for `harmful`: the most limited first, equal ones by kind."""
    if limited is None:
        return -1.0, kind
    return -max(limited.times, (limited.samples or 0) / (limited.counted or 1)), kind


def harmful(
    updates: Sequence[str], is_good: Callable[[frozenset[str]], bool], stalled: bool = False
) -> list[str]:
    """Find few updates to leave out for a good model; empty if they would not be few.

    Args:
        updates: All updates, the most suspicious first. Updates that may be harmful together
            should be neighbours.
        is_good: Whether the model is good if these updates are left out.
        stalled: Give up if the model is not good without one half or the other.
    """
    most = int((STALL_SHARE if stalled else 0.5) * len(updates))
    if len(updates) < LEAST_UPDATES or most == 0:
        return []
    good, middle = cache(is_good), len(updates) // 2
    # Leaving out many updates may spoil a model, too. So the first few are tried alone before.
    for size in (2**n for n in range(most.bit_length())):
        if good(frozenset(updates[:size])):
            return _needed(list(updates[:size]), frozenset(), good, most) or []
    if stalled and not any(good(frozenset(half)) for half in (updates[:middle], updates[middle:])):
        return []
    found = _needed(list(updates), frozenset(), good, most)
    return found if found is not None and good(frozenset(found)) else []


def _needed(
    group: list[str], out: frozenset[str], is_good: Callable[[frozenset[str]], bool], most: int
) -> list[str] | None:
    """The members of `group` that must be left out, besides those in `out`; None above `most`.

    Leaving out the whole group makes the model good.
    """
    if most < 1:
        return None
    if len(group) == 1:
        return group
    one, other = group[: len(group) // 2], group[len(group) // 2 :]
    for half in (one, other):
        if is_good(out.union(half)):
            return _needed(half, out, is_good, most)
    first = _needed(one, out.union(other), is_good, most - 1)  # `other` needs at least one
    if first is None:
        return None
    rest = _needed(other, out.union(first), is_good, most - len(first))
    return None if rest is None else first + rest


def judged_text(without: Judged, whole: Judged) -> str:
    """Why an update was left out: the quality without it and with all updates."""
    return f"{JUDGED}: {_text(without)} in place of {_text(whole)}"


def _text(quality: Judged) -> str:
    # Both, because either may miss the bar while the other stays the same.
    loss = f"loss {quality.loss:.4g}"
    return loss if quality.accuracy is None else f"accuracy {quality.accuracy:.4f}, {loss}"
