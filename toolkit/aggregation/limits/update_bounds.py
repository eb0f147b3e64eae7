"""Bounds on an update, relative to the received model and to other updates of the same round.

Honest updates differ widely in steps, learning rates, data and kinds of submodels. The bounds are
therefore orders of magnitude wide. They keep out numbers with which no device could continue to
train. They do not detect an attacker whose numbers have an ordinary size. Scales come from
`update_scales.py`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

LIMIT = 300.0
"""A tensor's largest number may be at most LIMIT times its reference.

Weights of honest updates reached 5 times their reference on ordinary data, and 48 times on inputs
that were a thousand times too large.
"""
WIDE = 30.0
"""An additional factor of the bound for statistics of batch norm and for factors.

Honest statistics reached 2,400 times the statistics of other devices on inputs that were a thousand
times too large (learning rate 1). On ordinary inputs, they reached 400 times (learning rate 0.5).
"""
UNIT = 1.0
"""The smallest reference. Tensors that begin at 0, such as biases, have no scale of their own."""
LOOSE = 1e6
"""An additional factor of the bound for tensors without a comparison. These are statistics of batch
norm and factors that no other update contains. If a round has only one update, these are all
tensors."""
SUSPICIOUS = 3.0
"""An update below this many times its reference is never suspected."""


class Scale(NamedTuple):
    """How large the numbers of one tensor are.

    `held` is the largest absolute number in the update. `received` is the largest absolute number
    in the model that the update was trained from. For a variance, both numbers are square roots.
    `loose` means that the tensor is a statistic or a factor, so the model alone gives no scale for
    it.
    """

    held: float
    received: float
    loose: bool = False


Scales = Mapping[str, Scale]
"""Scales by the name of a global tensor, or by submodel and name for factors that are averaged."""


class Excess(NamedTuple):
    """How far the numbers of an update's `tensor` exceed the number that they are compared with.

    `held` is the largest number in the update. `reference` is the number that it is compared with.
    If the tensor may exceed the reference more than other tensors may, `room` is the factor WIDE or
    LOOSE; else 1.
    """

    tensor: str = ""
    held: float = 0.0
    reference: float = UNIT
    room: float = 1.0

    @property
    def times(self) -> float:
        """`held` divided by `reference` and `room`. A result above LIMIT is too much."""
        # The reference may be inf, too, if several updates overflow.
        return self.held / self.reference / self.room if math.isfinite(self.held) else math.inf

    def __str__(self) -> str:
        return (
            f"{self.tensor!r} contains numbers up to {self.held:.3g}; in the received model and "
            f"the round's other updates they are up to {self.reference:.3g}"
        )


def excesses(round_: Mapping[str, Scales]) -> dict[str, Excess]:
    """Return, for each device, how far the worst tensor of its update exceeds its reference.

    The reference of a tensor is the largest of three numbers: what the device received, UNIT, and
    the upper median of the other updates. As long as most updates are honest, dishonest updates can
    neither raise the median to hide, nor lower the median to make an honest update look large.
    """
    held: dict[str, list[float]] = {}
    for own in round_.values():
        for name, scale in own.items():
            held.setdefault(name, []).append(scale.held)
    ordered = {name: sorted(values) for name, values in held.items()}
    return {
        device: max(
            _excesses(own, ordered, len(round_) == 1),
            key=lambda excess: excess.times,
            default=Excess(),
        )
        for device, own in round_.items()
    }


def _excesses(own: Scales, ordered: Mapping[str, Sequence[float]], only: bool) -> Iterator[Excess]:
    for name, scale in own.items():
        others = [*ordered[name]]
        others.remove(scale.held)
        middle = others[len(others) // 2] if others else 0.0
        reference = max(scale.received, middle, UNIT)
        lone = only or (scale.loose and not others)
        room = LOOSE if lone else WIDE if scale.loose else 1.0
        yield Excess(name, scale.held, reference, room)


def most_samples(samples: Sequence[int]) -> int:
    """The most samples that count in the weight of an update.

    `samples` are the numbers that all updates of the round claim. The result is LIMIT times their
    lower median, which a minority cannot raise.
    """
    return round(LIMIT * sorted(samples)[(len(samples) - 1) // 2])
