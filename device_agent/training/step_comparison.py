"""Compares the first training step of two forms of a bundle: losses and changes of tensors."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

CLOSE_LOSS, CLOSE_CHANGE = 1e-3, 0.05
"""Two losses may differ by the sum of two shares: CLOSE_LOSS of the loss, and CLOSE_CHANGE of its
change since the first loss. If a pre-activation is zero except for rounding, its gradient may
differ."""
CLOSE_STEP, SMALLEST_STEP = 0.01, 0.01
"""Two changes of a tensor may differ by the share CLOSE_STEP. A change smaller than SMALLEST_STEP
of the mean change counts as this share, because its gradient may be zero except for rounding.
Flipped masks of ReLUs caused differences of 0.003."""
ROUNDINGS = 10
"""Changes may also differ by this many times the effect of a nudge of all weights: Adam divides a
gradient by its own size, even if the gradient is only a rounding error."""
PROJECTIONS = 4
"""How many numbers represent the change of a tensor."""
CHUNK = 2**16
"""How many numbers of a tensor are projected at a time, to save memory."""


@dataclass(frozen=True)
class FirstStep:
    """The result of all training work for one batch.

    Attributes:
        losses: The losses.
        changes: Projections of the change of each tensor, by name.
    """

    losses: tuple[float, ...]
    changes: Mapping[str, np.ndarray]


def projected(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Project each tensor to a few numbers: sums of its elements with random signs.

    The signs depend only on the names of the tensors. If a tensor changes, each sum changes by
    about the norm of the change. So changes can be compared without a copy of the tensors.
    """
    sums_of = {}
    for index, name in enumerate(sorted(tensors)):
        flat, draw = tensors[name].reshape(-1), np.random.default_rng(index)
        sums = np.zeros(PROJECTIONS)
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK].astype(np.float64)
            bits = draw.integers(256, size=(len(part), 1), dtype=np.uint8)
            signs = np.unpackbits(bits, axis=1, count=PROJECTIONS, bitorder="little")
            # Do not use @: BLAS would keep buffers of tens of megabytes until the process ends.
            sums += np.einsum("n,nk->k", part, 1 - 2.0 * signs)
        sums_of[name] = sums
    return sums_of


def changed_since(
    before: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Project how much `tensors` have changed. `before` are their projections before the change."""
    after = projected(tensors)
    return {name: after[name] - sums for name, sums in before.items()}


def objection(plain: FirstStep, formed: FirstStep, nudged: Callable[[], FirstStep]) -> str | None:
    """Explain why a form must not be used. None if its first step agrees with the plain graphs.

    Args:
        plain: The first step of the plain graphs.
        formed: The first step of the form.
        nudged: Computes the first step of the plain graphs after a small random change of all
            weights.
    """
    for expected, loss in zip(plain.losses, formed.losses, strict=True):
        allowed = CLOSE_LOSS * abs(expected) + CLOSE_CHANGE * abs(expected - plain.losses[0])
        if not abs(expected - loss) <= allowed:  # also true if the loss is not a number
            return f"in its first steps the loss is {loss:.6g} instead of {expected:.6g}"
    apart = shares(plain, formed)
    if all(share <= CLOSE_STEP for share in apart.values()):
        return None
    moved = shares(plain, nudged())
    for name, share in apart.items():
        if not share <= max(CLOSE_STEP, ROUNDINGS * moved[name]):
            return f"in its first step the change of {name!r} differs by {share:.0%}"
    return None


def shares(plain: FirstStep, other: FirstStep) -> dict[str, float]:
    """Compare how `other` and `plain` have changed each tensor.

    Returns, for each tensor, the difference between the two changes, divided by the change in
    `plain`.
    """
    least = SMALLEST_STEP * rms([number for sums in plain.changes.values() for number in sums])
    apart = {name: rms(other.changes[name] - sums) for name, sums in plain.changes.items()}
    return {
        name: difference / max(rms(plain.changes[name]), least) if difference else 0.0
        for name, difference in apart.items()
    }


def rms(numbers: ArrayLike) -> float:
    """The root of the mean square of `numbers`; 0 if there are none."""
    return float(np.linalg.norm(numbers) / math.sqrt(max(1, np.size(numbers))))
