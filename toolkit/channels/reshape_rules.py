"""Rules for reshaping: axes are merged, or split in the way in which they were merged."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from toolkit.channels.channel_units import Axes, Axis, fixed_axis
from toolkit.channels.operator_call import (
    OPEN_SIZE,
    Division,
    Rule,
    Step,
    Value,
    is_fixed,
    require_unchanged,
)

aten = torch.ops.aten


def reshape(step: Step) -> Value:
    """View, reshape, flatten, unflatten, squeeze and unsqueeze."""
    x, after = step.axes("self"), step.sizes()
    before = tuple(map(len, x))
    if math.prod(before) != math.prod(after) or 0 in before:
        return require_unchanged(step)
    axes: list[Axis] = []
    for sources, sizes in matching_blocks(before, after):
        axes += regroup(step, x[sources], sizes)
    if step.node.target in SIZED:
        step.resize(SIZED[step.node.target], resized_axes(step, axes))
    return tuple(axes)


def squeeze(step: Step) -> Value:
    """Drop axes of size 1.

    A longer axis must keep two channels or more. With one channel, the axis would have size 1, and
    would also be dropped.
    """
    x = step.axes("self")
    dims = step.argument("dim") if step.takes("dim") else range(len(x))
    long = [x[dim] for dim in ([dims] if isinstance(dims, int) else dims) if len(x[dim]) > 1]
    step.require(
        long, lambda kept: all(kept.count(a) > 1 for a in long), "one channel would be left"
    )
    return reshape(step)


SIZED = {
    aten.view.default: "size",
    aten.reshape.default: "shape",
    aten._unsafe_view.default: "size",
    aten.unflatten.int: "sizes",
}


def resized_axes(step: Step, axes: Sequence[Axis]) -> Sequence[Axis]:
    """The axes whose sizes are in the arguments of the operator."""
    if step.node.target is not aten.unflatten.int:
        return axes
    (x,) = step.inputs()
    first = step.argument("dim") % len(x)
    return axes[first : first + len(step.argument("sizes"))]


def matching_blocks(
    before: tuple[int, ...], after: tuple[int, ...]
) -> list[tuple[slice, tuple[int, ...]]]:
    """Divide a reshape into the smallest groups of axes that are reshaped separately.

    Returns for each group the indices of its axes before, and its sizes after.
    """
    blocks = []
    i = j = 0
    while i < len(before) or j < len(after):
        start, first = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (size_before := math.prod(before[start:i])) != (
            size_after := math.prod(after[first:j])
        ):
            i, j = (i + 1, j) if size_before < size_after else (i, j + 1)
        blocks.append((slice(start, i), after[first:j]))
    return blocks


def regroup(step: Step, axes: Axes, sizes: tuple[int, ...]) -> list[Axis]:
    """Axes of the given sizes that contain the elements of `axes` in the same order."""
    if len(axes) == 1 and len(sizes) == 1:
        return list(axes)
    for axis in axes:
        step.units.pin_if_repeated(axis)
    reason = f"it turns axes of {format_sizes(map(len, axes))} into {format_sizes(sizes)}"
    free = [dim for dim, axis in enumerate(axes) if not is_fixed(axis, step.units)]
    long = [dim for dim in free if len(axes[dim]) > 1]
    spread = None
    if len(long) == 1:
        spread = trace_channels(step, axes, long[0], sizes) or divide(step, axes, long[0], sizes)
    for dim in free:
        if spread is None or dim not in long:
            step.require_all(axes[dim], reason)
    return spread or [fixed_axis(size) for size in sizes]


def trace_channels(
    step: Step, axes: Axes, channels: int, sizes: tuple[int, ...]
) -> list[Axis] | None:
    """Find the new axis that alone determines the channel, as axis `channels` did before.

    Returns axes with the new `sizes`; None if no new axis alone determines the channel.
    """
    small = sample_sizes(sizes)
    # An axis of the result determines the channel if the units do not depend on the other axes.
    full = units_of_elements(step, axes, channels).reshape(small)
    for dim in range(len(sizes)):
        others = tuple(i for i in range(len(sizes)) if i != dim)
        alone = full.min(axis=others, keepdims=True)
        fits = np.array_equal(np.broadcast_to(alone, full.shape), full)
        if fits and (units := without_samples(alone.reshape(-1), sizes[dim])) is not None:
            return with_channels(sizes, dim, units)
    return None


def divide(step: Step, axes: Axes, channels: int, sizes: tuple[int, ...]) -> list[Axis] | None:
    """Let one new axis carry the channels, and unite channels with the same index on this axis.

    `TrackedChannels.choices` says how many of the possible axes were tried before; these are
    skipped. Returns None if no other axis is left.
    """
    small = sample_sizes(sizes)
    options = [dim for dim, size in enumerate(sizes) if size > 1 and size != OPEN_SIZE]
    if step.tracked.inner_first:
        options.reverse()
    full = units_of_elements(step, axes, channels).reshape(small)
    for dim in options[step.tracked.choices.get(step.node, 0) :]:
        rows = np.moveaxis(full, dim, 0).reshape(small[dim], -1)
        units = without_samples(rows, sizes[dim])
        if units is not None:
            for column in range(1, units.shape[1]):
                step.units.join(units[:, 0], units[:, column])
            step.tracked.divisions.append(Division(step.node, units[:, 0]))
            return with_channels(sizes, dim, units[:, 0])
    return None


SAMPLES = 2
"""The batch size that is assumed to examine all elements of a tensor."""


def sample_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """`sizes` with SAMPLES in place of the batch size."""
    return tuple(
        size // OPEN_SIZE * SAMPLES if size % OPEN_SIZE == 0 and size else size for size in sizes
    )


def units_of_elements(step: Step, axes: Axes, channels: int) -> Axis:
    """For every element of a tensor with `axes`: the unit of its index on axis `channels`."""
    small = sample_sizes(map(len, axes))
    shape = [size if dim == channels else 1 for dim, size in enumerate(small)]
    alone = step.units.roots(axes[channels][: small[channels]]).reshape(shape)
    return np.broadcast_to(alone, small)


def without_samples(units: Axis, size: int) -> Axis | None:
    """The units of an axis of `size` for one sample; None if they differ between samples."""
    if size % OPEN_SIZE:
        return units
    first, second = units.reshape(SAMPLES, -1, *units.shape[1:])
    return first if np.array_equal(first, second) else None


def with_channels(sizes: tuple[int, ...], dim: int, channels: Axis) -> list[Axis]:
    """Axes of the given sizes. The axis `dim` has the units `channels`; all other axes are fixed.

    If the axis `dim` joins the batch and the channels, its units are repeated for each sample.
    """
    result = [fixed_axis(size) for size in sizes]
    result[dim] = np.resize(channels, sizes[dim])
    return result


def format_sizes(sizes: Iterable[int]) -> str:
    """Sizes in words, for messages."""
    return " x ".join("batch" if size == OPEN_SIZE else str(size) for size in sizes)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), reshape),
    "unsqueeze": reshape,
    "squeeze": squeeze,
}
