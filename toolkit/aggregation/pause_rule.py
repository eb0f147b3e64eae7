"""The rule by which the judge of new models pauses a device.

Two conditions must hold for the last LAST updates of a device. First, more than half of them did
harm: they were left out, went too far, or a change in them exceeded its limit by more than the
factor FAR. Second, at least three were left out, or at least five exceeded a limit by this factor.
Fewer updates do not count, because honest devices also send some updates of this sort. For example,
a device with unusual data exceeds a limit by this factor in at most a third of its rounds, mostly
in the first rounds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from device_agent.formats.protocol.fleet import FAR, Limited
from toolkit.aggregation.model_judge import JUDGED

LAST = 20
"""How many of a device's last updates count."""
LEFT_OUT = 3
BEYOND = 5
"""A device is only paused if at least this many updates were left out, or exceeded a limit by
FAR."""


@dataclass
class Harm:
    """The rounds in which the updates of a device did harm.

    Attributes:
        left_out: The rounds in which the judge left out its update.
        too_far: The rounds in which only a part of its samples counted, because its update went
            too far.
        beyond: The rounds in which a change exceeded its limit by more than the factor FAR.

    Examples:
        >>> Harm([1, 2, 4]).to_pause_for([1, 2, 3, 4]), Harm([1, 2, 4]).to_pause_for(range(6))
        ([1, 2, 4], [])
        >>> Harm([1, 2, 4], [5]).to_pause_for(range(6)), Harm([1, 2], [3]).to_pause_for(range(4))
        ([1, 2, 4, 5], [])
        >>> Harm(beyond=[1, 2, 3, 4, 5]).to_pause_for(range(8))
        [1, 2, 3, 4, 5]
    """

    left_out: list[int] = field(default_factory=list)
    too_far: list[int] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)

    def to_pause_for(self, sent: Iterable[int]) -> list[int]:
        """The rounds that are the reason to pause the device; empty if it is not paused.

        `sent` are the rounds of its updates.
        """
        recent = sorted(sent)[-LAST:]
        out, beyond = ({*recent}.intersection(rounds) for rounds in (self.left_out, self.beyond))
        harm = out | beyond | {*recent}.intersection(self.too_far)
        enough = len(out) >= LEFT_OUT or len(beyond) >= BEYOND
        return sorted(harm) if enough and 2 * len(harm) > len(recent) else []

    def text(self, rounds: Iterable[int]) -> str:
        """Describe, for the operator, the judge's decisions in `rounds`.

        Examples:
            >>> Harm([1, 4], [2], [2, 3]).text([1, 2, 3])
            'left out 1, counted 1 in part, and found 2 far beyond a limit'
        """
        kinds = {
            "left out {}": self.left_out,
            "counted {} in part": self.too_far,
            "found {} far beyond a limit": self.beyond,
        }
        counts = {words: len({*own}.intersection(rounds)) for words, own in kinds.items()}
        *first, last = [words.format(count) for words, count in counts.items() if count]
        return f"{', '.join(first)}, and {last}" if first else last


def add_round(
    harm: dict[str, Harm],
    round_: int,
    left_out: Mapping[str, str],
    limited: Mapping[str, Limited],
) -> None:
    """Add a round to the `harm` of each device.

    For each device, `left_out` has the reason why its update was left out, and `limited` has the
    limits that changed its update. Updates that a committee leaves out do not count, because some
    of them are honest.
    """
    for device, reason in left_out.items():
        if reason.startswith(JUDGED):
            harm.setdefault(device, Harm()).left_out.append(round_)
    for device, limits in limited.items():
        if limits.too_far:
            harm.setdefault(device, Harm()).too_far.append(round_)
        if limits.times > FAR:
            harm.setdefault(device, Harm()).beyond.append(round_)
