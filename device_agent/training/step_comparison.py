"""Compares the first training step of two forms of a bundle: its losses, and what it changes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

CLOSE_LOSS, CLOSE_CHANGE = 1e-3, 0.05
"""How far two losses may differ: by this share of the loss, and of its change since the first one.
A pre-activation within rounding of zero may take another gradient."""
CLOSE_STEP, SMALLEST_STEP = 0.01, 0.01
"""How far the changes of a tensor may differ: by this share of its change. A change below the other
share of all changes counts as that large, because the gradient may be zero but for rounding.
Flipped masks of ReLUs made differences of 0.003."""
ROUNDINGS = 10
"""Changes may also differ by this many times what a nudge of all weights makes of them: Adam
divides a gradient by its own size, also one that is only rounding."""
PROJECTIONS = 4
"""Numbers that stand for the change of a tensor."""
CHUNK = 2**16
"""Numbers of a tensor that are projected at a time, so that this takes little memory."""


@dataclass(frozen=True)
class FirstStep:
    """All training work for one batch.

    Attributes:
        losses: Its losses.
        changes: Projections of what it changed, by tensor.
    """

    losses: tuple[float, ...]
    changes: Mapping[str, np.ndarray]


def projected(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A few numbers for each tensor: sums of its numbers with signs drawn at random.

    The signs depend on the names alone. A change of the tensor changes each sum by a number of
    about the change's norm, so that wrong tensors are seen without keeping the right ones.
    """
    sums_of = {}
    for index, name in enumerate(sorted(tensors)):
        flat, draw = tensors[name].reshape(-1), np.random.default_rng(index)
        sums = np.zeros(PROJECTIONS)
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK].astype(np.float64)
            bits = draw.integers(256, size=(len(part), 1), dtype=np.uint8)
            signs = np.unpackbits(bits, axis=1, count=PROJECTIONS, bitorder="little")
            # Not by @: BLAS would take buffers of tens of megabytes for the life of the process.
            sums += np.einsum("n,nk->k", part, 1 - 2.0 * signs)
        sums_of[name] = sums
    return sums_of


def changed_since(
    before: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The projections of what changed in `tensors` since they were projected to `before`."""
    after = projected(tensors)
    return {name: after[name] - sums for name, sums in before.items()}


def objection(plain: FirstStep, formed: FirstStep, nudged: Callable[[], FirstStep]) -> str | None:
    """Why a form must not be used; None if its first step agrees with that of the plain graphs.

    Args:
        plain: The first step of the plain graphs.
        formed: The first step of the form.
        nudged: Makes the first step of the plain graphs with nudged weights.
    """
    for expected, loss in zip(plain.losses, formed.losses, strict=True):
        allowed = CLOSE_LOSS * abs(expected) + CLOSE_CHANGE * abs(expected - plain.losses[0])
        if not abs(expected - loss) <= allowed:  # true for a loss that is not a number, too
            return f"in its first steps the loss is {loss:.6g} instead of {expected:.6g}"
    apart = shares(plain, formed)
    if all(share <= CLOSE_STEP for share in apart.values()):
        return None
    moved = shares(plain, nudged())
    for name, share in apart.items():
        if not share <= max(CLOSE_STEP, ROUNDINGS * moved[name]):
            return f"its first step changes {name!r} otherwise, by {share:.0%} of the change"
    return None


def shares(plain: FirstStep, other: FirstStep) -> dict[str, float]:
    """How far the change of each tensor in `other` is from that in `plain`, by its size there."""
    least = SMALLEST_STEP * rms([number for sums in plain.changes.values() for number in sums])
    apart = {name: rms(other.changes[name] - sums) for name, sums in plain.changes.items()}
    return {
        name: difference / max(rms(plain.changes[name]), least) if difference else 0.0
        for name, difference in apart.items()
    }


def rms(numbers: ArrayLike) -> float:
    """The root of the mean square of `numbers`; 0 for none."""
    return float(np.linalg.norm(numbers) / math.sqrt(max(1, np.size(numbers))))
