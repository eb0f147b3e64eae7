"""The option `augment` of a training: random changes of the samples in each training step.

The functions that change samples are in `augmented_samples.py`. This module needs no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from profiles.errors import InputError

Kind = Literal["flip", "flip-vertical", "shift", "noise", "mask"]
FORMS = "flip, flip-vertical, shift:N, noise:STD, mask:N"
MOST_STEPS = 10_000


@dataclass(frozen=True)
class Augmentation:
    """A random change of each sample of a training batch.

    Attributes:
        kind: `flip` mirrors a picture left to right with probability 1/2. `flip-vertical` mirrors
            it top to bottom with probability 1/2. `shift` moves a picture or a series by up to
            `amount` places and fills the gap with zeros, like padding with random cropping. `noise`
            adds normal numbers with the standard deviation `amount`. `mask` sets up to `amount`
            successive steps of a series to zero.
        amount: See `kind`; 0 for flips.
        axis: The axis of the samples that has the steps of a series.
    """

    kind: Kind
    amount: float = 0.0
    axis: Literal["first", "last"] | None = None


def parse_augmentation(text: str) -> Augmentation:
    """Read an augmentation like flip, shift:4, noise:0.1 or mask:10:last.

    Raises InputError if `text` is not an augmentation.
    """
    kind, *rest = text.split(":")
    axis: Literal["first", "last"] | None = None
    if kind in ("shift", "mask") and rest[1:] in (["first"], ["last"]):
        axis = "first" if rest.pop() == "first" else "last"
    if kind in ("flip", "flip-vertical") and not rest:
        return Augmentation("flip" if kind == "flip" else "flip-vertical")
    if len(rest) == 1:
        try:
            if kind == "noise" and 0 < float(rest[0]) <= 1e6:
                return Augmentation("noise", float(rest[0]))
            if kind in ("shift", "mask") and 1 <= int(rest[0]) <= MOST_STEPS:
                return Augmentation("shift" if kind == "shift" else "mask", int(rest[0]), axis)
        except ValueError:
            pass
    raise InputError(
        "Unknown augmentation {given!r}. It must be one of {forms}. N is the largest number of "
        "pixels or steps that change, at least 1; STD is a standard deviation. For shift and mask "
        "of a time series, also name the axis of the steps: shift:N:first for samples (steps, "
        "columns), shift:N:last for (columns, steps).",
        code="option.invalid-value",
        option="augment",
        given=text[:40],
        forms=FORMS,
    )


def fitting(
    texts: Sequence[str], shape: tuple[int, ...], plain: bool, whole: bool = False
) -> tuple[Augmentation, ...]:
    """Read augmentations for samples of `shape`.

    Args:
        texts: The augmentations.
        shape: Shape of one sample.
        plain: Whether the samples are one float32 array (not ids, and not several inputs).
        whole: Whether some numbers of the samples are known to be whole, such as ids in a table.

    Returns:
        The augmentations. If the samples are series, `axis` of each augmentation is set.

    Raises:
        InputError: An augmentation does not fit such samples.
    """
    augmentations = tuple(map(parse_augmentation, texts))
    for text, given in zip(texts, augmentations, strict=True):
        reason = misfit_of(given, shape, plain, whole)
        if reason:
            raise InputError(
                "The augmentation {given!r} does not fit samples of the shape {shape}: {reason}.",
                code="config.augmentation-misfit",
                given=text,
                shape=shape,
                reason=reason,
            )
    return augmentations


def misfit_of(given: Augmentation, shape: tuple[int, ...], plain: bool, whole: bool = False) -> str:
    """The reason why an augmentation does not fit samples of `shape`. Empty if it fits."""
    picture = len(shape) == 3
    if not plain:
        return "they contain ids or several inputs, but only arrays of numbers can be changed"
    if given.kind == "noise":
        # Whole pixels are no ids.
        ids = whole and not picture
        return (
            "some of their numbers are whole, so they may be ids, and noise would change ids"
            if ids
            else ""
        )
    if given.kind in ("flip", "flip-vertical"):
        return "" if picture else "only pictures (channels, height, width) can be flipped"
    if picture:
        if given.kind == "mask":
            return "mask is for series"
        if given.axis is not None:
            return "first and last are for series (steps, columns) or (columns, steps)"
        steps = min(shape[1:])
    elif len(shape) == 2:
        if given.axis is None:
            return (
                f"name the axis of the steps: {given.kind}:{math.floor(given.amount)}:first or "
                ":last"
            )
        steps = shape[0 if given.axis == "first" else 1]
    elif len(shape) == 1:
        steps = shape[0]
    else:
        return "it is for pictures (channels, height, width) and series"
    return "" if given.amount < steps else f"it must be below {steps}"
