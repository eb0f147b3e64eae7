"""A committee of devices accepts or rejects the new model of a round.

Without held-out samples of its own, a coordinator does not know whether a round has made the model
worse. Therefore some of the round's devices evaluate the new model before it is published, on
samples on which they never train. Each device compares the new model with the previous model on the
same samples, and has one vote (BaFFLe, Andreina et al. 2021). If at least half of the votes say
"worse", the updates that point against most other updates are left out, and the committee judges
the model without them. If the committee also rejects this model, all updates of the round are left
out.

Each device compares losses itself, and only votes are counted. So a hostile member has one vote,
whatever it claims, and a minority of the committee cannot decide.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median

from device_agent.formats.evaluation_counts import EvaluationCounts
from profiles.text_formatting import counted

MARGIN = 0.1
"""A device votes against a model that raises its mean loss by more than this share. Honest rounds
also raise the loss of some devices, especially if each device has few classes."""
FEWEST = 3
"""With fewer votes, one hostile device could decide, so the updates of the round are left out."""
LARGEST_SHOWN = 10
"""A larger rise is not shown exactly: a diverged model may raise the loss without limit."""
UNJUDGED = "the committee could not judge the new model"
"""The reason why the updates of a round were left out begins with this text, or with REJECTED."""
REJECTED = "the committee has rejected the new model"
DISAGREES = "it points against the other updates, and"
"""If the committee accepts a model without an update, the reason for leaving out this update begins
with this text."""


@dataclass(frozen=True)
class Committee:
    """The votes of the devices that were `asked` about a new model.

    Attributes:
        asked: How many devices were asked.
        rises: For each device that has answered, the share by which the new model raises its loss;
            negative if the model lowers the loss.

    Examples:
        >>> committee = Committee(5, {"a": 0.5, "b": -0.2, "c": 0.7, "d": 0.3})
        >>> committee.worse, committee.is_decided, committee.accepts
        (3, True, False)
        >>> committee.text()
        'the committee has rejected the new model: it raises the loss of 3 of 4 devices by more \
than 10% (median 40%)'
    """

    asked: int
    rises: Mapping[str, float] | Mapping[int, float] = field(default_factory=dict)

    @property
    def worse(self) -> int:
        """How many devices vote against the new model."""
        return sum(rise > MARGIN for rise in self.rises.values())

    @property
    def is_decided(self) -> bool:
        """Whether the decision is certain, whatever the missing answers are."""
        votes, worse = len(self.rises), self.worse
        return votes == self.asked or (
            votes >= FEWEST and max(2 * worse + 1, 2 * (votes - worse)) > self.asked
        )

    @property
    def accepts(self) -> bool:
        """Whether the new model is accepted. It is rejected if too few devices have answered."""
        votes = len(self.rises)
        return votes >= FEWEST and 2 * self.worse < votes

    @property
    def rejects(self) -> bool:
        """Whether enough devices have answered, and the new model is not accepted."""
        return len(self.rises) >= FEWEST and not self.accepts

    def text(self) -> str:
        """The decision, for the operator."""
        votes = len(self.rises)
        if votes < FEWEST:
            return f"{UNJUDGED}: {votes} of {counted(self.asked, 'device')} answered, and at " + (
                f"least {FEWEST} must"
            )
        verdict = "the committee has accepted the new model" if self.accepts else REJECTED
        middle = median(self.rises.values())
        shown = f"{middle:.0%}" if middle <= LARGEST_SHOWN else f"above {LARGEST_SHOWN:.0%}"
        return (
            f"{verdict}: it raises the loss of {self.worse} of {counted(votes, 'device')} by more "
            f"than {MARGIN:.0%} (median {shown})"
        )


def rise(before: EvaluationCounts, after: EvaluationCounts) -> float | None:
    """The share by which a new model raises a device's mean loss; None if nothing can be compared.

    `before` has the counts of the previous model, and `after` has the counts of the new model. They
    can be compared if both count the same number of samples and of labels, at least one of each. If
    the new loss is not finite, the result is infinite.

    Examples:
        >>> def counts(loss):
        ...     return EvaluationCounts(samples=10, counted=10, correct=5, loss_sum=loss)
        >>> rise(counts(4.0), counts(5.0))
        0.25
    """
    same = (before.samples, before.counted) == (after.samples, after.counted)
    if not same or not before.counted:
        return None
    if not isfinite(after.loss_sum):
        return inf
    difference = after.loss_sum - before.loss_sum
    if not difference:
        return 0.0
    return difference / abs(before.loss_sum) if before.loss_sum else inf * difference
