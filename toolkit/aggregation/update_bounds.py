"""Bounds on an update, beside what its device received and the other updates of its round.

Honest updates differ much: by steps, learning rates, data and kinds of submodels. The bounds are
therefore orders of magnitude wide. They keep out numbers with which no device could train on; they
do not find an attacker whose numbers are of ordinary size. Scales come from `update_scales.py`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

LIMIT = 300.0
"""How many times as large as its reference a tensor's largest number may be.

Weights of honest updates had up to 5 on ordinary data, and up to 48 on inputs a thousand times too
large.
"""
WIDE = 30.0
"""How much more statistics of batch norm and factors may hold.

On inputs a thousand times too large, honest statistics had up to 2,400 times the numbers of the
others', at a learning rate of 1; on the others' inputs up to 400 at a learning rate of 0.5.
"""
UNIT = 1.0
"""The least reference. Tensors that begin at 0, such as biases, have no scale of their own."""
LOOSE = 1e6
"""How much more a tensor may hold that no other update holds, if the model gives no scale for it:
statistics of batch norm, factors, and everything in a round's only update."""
SUSPICIOUS = 3.0
"""An update below this many times its reference is never suspected."""


class Scale(NamedTuple):
    """The largest absolute numbers of one tensor; for variances, their square roots.

    `held` is that of the update and `received` that of the model that it was trained from. `loose`
    tensors, statistics and factors, have no scale that a model alone gives.
    """

    held: float
    received: float
    loose: bool = False


Scales = Mapping[str, Scale]
"""By the name of a global tensor, or by submodel and name for factors that are averaged."""


class Excess(NamedTuple):
    """How far the `tensor` of an update is beyond its reference: `held` is `times` `reference`."""

    times: float
    tensor: str = ""
    held: float = 0.0
    reference: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.tensor!r} holds numbers up to {self.held:.3g}; those that the device received "
            f"and those of the round's other updates are up to {self.reference:.3g}"
        )


def excesses(round_: Mapping[str, Scales]) -> dict[str, Excess]:
    """How far each update of a round, by device, is beyond its references, in its worst tensor.

    The reference of a tensor is the largest of what the device received, UNIT, and the upper median
    of what the other updates hold. As long as most updates are honest, the others can neither hide
    behind a higher median nor make an honest update look large by a lower one.
    """
    held: dict[str, list[float]] = {}
    for own in round_.values():
        for name, scale in own.items():
            held.setdefault(name, []).append(scale.held)
    ordered = {name: sorted(values) for name, values in held.items()}
    return {
        device: max(
            _excesses(own, ordered, len(round_) == 1), key=lambda one: one.times, default=Excess(0)
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
        # The reference may be inf, too, if several updates overflow.
        times = scale.held / reference / room if math.isfinite(scale.held) else math.inf
        yield Excess(times, name, scale.held, reference)


def most_samples(samples: Sequence[int]) -> int:
    """The most samples by which one of several updates may be weighted, given what all claim.

    LIMIT times the lower median of the claims, which a minority cannot raise.
    """
    return round(LIMIT * sorted(samples)[(len(samples) - 1) // 2])
