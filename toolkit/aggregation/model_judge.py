"""Finds the updates that make a new model worse on held-out samples.

The limits of `update_limits.py` do not stop a device that sends the reverse of an honest change.
Held-out samples show the damage. Each round is judged in four steps:

1. The influence of each update on the loss (`influence.py`) shows which updates raise the loss.
   These updates are suspected, as in Zeno (Xie et al. 2019). In most honest rounds no update is
   suspected.
2. The round is aggregated without the most suspected update, then without the two most suspected
   updates, the four most suspected, and so on.
3. Suspected updates are left out only if the model without them is clearly better. Both models
   predict the same samples, and the differences are compared (a paired test). This finds much
   smaller differences than a comparison of two accuracies.
4. If the model is not clearly worse with a part of a suspected update's weight, the update stays
   with this part.

Some honest updates also raise the loss of their round, for example updates of a device with few
classes. So the model without them must not only be better, but make much more progress. An honest
update of this sort mostly goes too far in the right direction: with a part of its weight, the model
is about as good as without the update, or better. In contrast, the reverse of an honest change and
a change towards wrong labels do harm with any weight. If the honest update were left out, the model
would not learn what only this device knows. The next update of the device would change as much, and
would also be left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np

from device_agent.formats.protocol.fleet import Limited

SUSPECT = 0.75
"""An update is suspected if it raises the loss by more than this multiple of a mean: the mean by
which the updates of its round lower the loss."""
PROGRESS = 0.3
"""Without the updates that are left out, the loss must fall further than with them, by at least
this share."""
LEAST = 0.003
"""The loss must also fall further by at least this share of the loss before the round. This matters
for a trained model, whose loss hardly falls any more."""
ERRORS = 3.0
"""The mean difference of two losses must be at least this many standard errors."""
MOST = 0.4
"""At most this share of a round's updates may be left out: the most suspected ones."""
PART = 4
"""An update that goes too far counts as if its device had 1 / PART of its samples."""
REST = 0.15
"""If an update counts in part, at most this share of its rise of the loss may remain."""
TRIALS = 8
"""At most this many models are tried to find updates that only go too far. All other harmful
updates are left out."""
LEAST_UPDATES = 3
"""If a round has fewer updates, none is left out, because it is unknown which one is harmful."""
JUDGED = "without it the model is better on the held-out samples"
"""If the new model was judged, the reason why an update was left out begins with this text."""


class Judged(Protocol):
    """The quality of a model on held-out samples; see `Evaluation`."""

    @property
    def accuracy(self) -> float | None:
        """The share of correct predictions; None for a regression."""

    @property
    def loss(self) -> float:
        """The mean loss."""

    @property
    def groups(self) -> np.ndarray | None:
        """The sums of the losses and the numbers of labels, by groups of samples."""


Candidates = Callable[[Set[str], Set[str]], Judged | None]
"""(updates left out, updates with a part of their weight) -> the quality of this model; None if the
model is not usable."""


class Verdict(NamedTuple):
    """The decision about the updates that make a model worse.

    Attributes:
        left_out: The updates that do not count.
        weakened: The updates that count with a part of their weight.
    """

    left_out: Sequence[str] = ()
    weakened: Sequence[str] = ()


def judge_updates(
    suspected: Sequence[str], before: Judged, whole: Judged, candidate: Candidates
) -> Verdict:
    """Find the updates that make a model worse. Some of these updates only go too far.

    Args:
        suspected: The updates, the most suspected first.
        before: The quality of the model before the round.
        whole: The quality of the model with all updates.
        candidate: The quality of other models of this round.
    """
    nothing = frozenset[str]()
    found = harmful(suspected, before, whole, lambda out: candidate(out, nothing))
    weakened = too_far(found, whole, candidate)
    return Verdict([update for update in found if update not in weakened], weakened)


def suspects(influences: Mapping[str, float]) -> list[str]:
    """The updates that may be left out, the most suspected first.

    Args:
        influences: How much each update raises the loss; negative if it lowers the loss.

    Examples:
        >>> suspects({"a": -0.2, "b": 0.3, "c": -0.1})
        ['b']
    """
    count = len(influences)
    if count < LEAST_UPDATES:
        return []
    lowered = sum(max(-value, 0.0) for value in influences.values()) / count
    ordered = sorted(influences, key=lambda key: (-influences[key], key))
    raising = [key for key in ordered if influences[key] > SUSPECT * lowered]
    return raising[: int(MOST * count)]


def harmful(
    suspected: Sequence[str],
    before: Judged,
    whole: Judged,
    without: Callable[[frozenset[str]], Judged | None],
) -> list[str]:
    """Find the harmful updates: a new model without these updates is clearly better.

    Models without the first 1, 2, 4, ... of `suspected` are compared. Then a search finds the
    fewest updates that must be left out. For n suspected updates, `without` is called at most about
    2 log2(n) + 1 times.

    Args:
        suspected: The updates, the most suspected first.
        before: The quality of the model before the round.
        whole: The quality of the model with all updates.
        without: Computes the quality of the model without a set of updates. None if this model is
            not usable.

    Returns:
        The first updates of `suspected`, up to the last harmful one. Empty if no compared model is
        clearly better than the model with all updates.
    """

    @cache
    def quality(size: int) -> Judged | None:
        return whole if size == 0 else without(frozenset(suspected[:size]))

    def better(size: int, other: int) -> bool:
        one, two = quality(size), quality(other)
        return one is not None and (two is None or is_better(one, two, before.loss))

    count = len(suspected)
    sizes = sorted({count, *(2**n for n in range(count.bit_length()) if 2**n <= count)} - {0})
    least, most = 0, 0
    for size in sizes:
        if better(size, most):
            least, most = most, size
    accepted = least
    while most - least > 1:  # the smallest number of updates that is as good as `most`
        middle = (least + most) // 2
        if better(middle, accepted) and not better(most, middle):
            most = middle
        else:
            least = middle
    return list(suspected[:most])


def too_far(found: Sequence[str], whole: Judged, candidate: Candidates) -> list[str]:
    """The updates in `found` that do no clear harm with a part of their weight.

    A model in which these updates have a part of their weight is compared with two models: the
    model without `found`, and the model with all updates, whose quality is `whole`. Groups of
    updates are tried first, then the halves of these groups.
    """
    stay: list[str] = []
    best = candidate(frozenset(found), frozenset()) if found else None
    if best is None:
        return stay
    groups = [list(found)]
    for _ in range(TRIALS):
        if not groups:
            break
        group = groups.pop(0)
        inside = frozenset([*stay, *group])
        quality = candidate(frozenset(found) - inside, inside)
        most = best.loss + REST * (whole.loss - best.loss)
        if quality is not None and quality.loss <= most and standard_errors(best, quality) < ERRORS:
            stay += group
        elif len(group) > 1:
            middle = len(group) // 2
            groups += [group[:middle], group[middle:]]
    return stay


def counted_samples(samples: int, most: int | None) -> int:
    """The number of samples that count for an update that goes too far.

    If the update did not go too far, at most `most` of its `samples` would count; None means all.
    """
    return max(1, min(samples, most or samples) // PART)


def with_part(limited: Limited | None, samples: int, counted: int) -> Limited:
    """The report about an update that goes too far. `limited` reports the other limits."""
    return replace(limited or Limited(), samples=samples, counted=counted, too_far=True)


def is_better(one: Judged, other: Judged, before: float) -> bool:
    """Whether the model `one` is clearly better than `other`, both after a round.

    `before` is the loss before the round.
    """
    if not math.isfinite(other.loss):
        return math.isfinite(one.loss)
    needed = max(PROGRESS * abs(before - other.loss), LEAST * abs(before))
    return other.loss - one.loss >= needed and standard_errors(one, other) >= ERRORS


def standard_errors(one: Judged, other: Judged) -> float:
    """How many standard errors the loss of `one` is below the loss of `other`, in a paired test.

    Let d_i be the differences of the sums over k groups of n_i labels, and m their mean per label.
    The standard error is sqrt(k / (k - 1) sum_i (d_i - m n_i)^2) / sum_i n_i. The result is 0 if
    there are fewer than two groups, or if the groups are not known.
    """
    if one.groups is None or other.groups is None or len(one.groups) < 2:
        return 0.0
    differences, labels = other.groups[:, 0] - one.groups[:, 0], one.groups[:, 1]
    mean = differences.sum() / labels.sum()
    count = len(differences)
    squares = np.square(differences - mean * labels).sum() * count / (count - 1)
    error = math.sqrt(squares) / labels.sum()
    return float(mean / error) if error > 0 else math.copysign(math.inf, mean) if mean else 0.0


def judged_text(without: Judged, whole: Judged) -> str:
    """Why an update was left out: the quality without it and with all updates."""
    return f"{JUDGED}: {_text(without)} in place of {_text(whole)}"


def _text(quality: Judged) -> str:
    loss = f"loss {quality.loss:.4g}"
    return loss if quality.accuracy is None else f"accuracy {quality.accuracy:.4f}, {loss}"
