"""Slices of global tensors. An uploaded tensor may have only some elements of a global tensor.

In a manifest the ranges of a slice are called `part`.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from profiles.errors import UpdateError
from toolkit.submodels.submodel import Ranges, Shapes


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a tensor.

    Attributes:
        whole_shape: Shape of the whole tensor.
        ranges: The elements in the slice.
    """

    whole_shape: tuple[int, ...]
    ranges: Ranges

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(sum(stop - start for start, stop in axis) for axis in self.ranges)

    @cached_property
    def index(self) -> tuple[slice, ...] | tuple[Tensor, ...]:
        """The index of the slice: Python slices if each axis has one range, else index tensors.

        Indexing with Python slices gives a view, which `add_to` can change in place.
        """
        if all(len(ranges) == 1 for ranges in self.ranges):
            return tuple(slice(*ranges[0]) for ranges in self.ranges)
        # Like those of numpy.ix_, the index tensors broadcast against each other.
        axes = [torch.cat([torch.arange(*ends) for ends in ranges]) for ranges in self.ranges]
        last = len(axes) - 1
        return tuple(axis.reshape(-1, *[1] * (last - n)) for n, axis in enumerate(axes))

    def add_to(self, target: Tensor, value: Tensor | float, weight: float = 1.0) -> None:
        """Compute target[slice] += weight * value, in place.

        Args:
            target: A tensor of `whole_shape`.
            value: A number, or a tensor of `shape`.
            weight: The factor of `value`.
        """
        current = target[self.index]
        current.add_(value, alpha=weight)
        # Index tensors return a copy, so write it back.
        if not isinstance(self.index[0], slice):
            target[self.index] = current


def take_slice(tensor: Tensor, ranges: Ranges) -> Tensor:
    """The elements of `tensor` in `ranges`. The ranges of an axis are concatenated."""
    for axis, pieces in enumerate(ranges):
        tensor = torch.cat([tensor.narrow(axis, a, b - a) for a, b in pieces], axis)
    return tensor


def slice_of(entry: TensorEntry, shape: tuple[int, ...]) -> TensorSlice | None:
    """The slice of a global tensor that `entry` has. `shape` is the shape of the global tensor.

    None if the entry has the whole tensor.
    """
    if entry.part is None or entry.part == tuple(((0, size),) for size in shape):
        return None
    return TensorSlice(shape, entry.part)


def slice_shape(entry: TensorEntry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the slice that `entry` has. `shape` is the shape of the whole global tensor."""
    part = slice_of(entry, shape)
    return shape if part is None else part.shape


def slice_size(entry: TensorEntry, shape: tuple[int, ...]) -> int:
    """How many elements `entry` has. `shape` is the shape of the whole global tensor."""
    return math.prod(slice_shape(entry, shape))


def group_by_global_tensor(table: Sequence[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """Map the name of each global tensor to its entries in `table`, in the order of the table."""
    groups: dict[str, list[TensorEntry]] = {}
    for entry in table:
        groups.setdefault(entry.stands_for or "", []).append(entry)
    return groups


def slice_shapes(table: Sequence[TensorEntry], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Map the name of each global tensor to the shape of its slice in the table.

    The table must have been checked before.
    """
    return {
        name: slice_shape(entries[0], shapes[name])
        for name, entries in group_by_global_tensor(table).items()
    }


def slices_by_tensor(table: Sequence[TensorEntry], shapes: Shapes) -> dict[str, TensorSlice]:
    """Map each global tensor to its slice in the table. Leave out whole tensors."""
    slices = {e.stands_for: slice_of(e, shapes[e.stands_for]) for e in table if e.stands_for}
    return {name: part for name, part in slices.items() if part is not None}


def check_slice(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    """Raise UpdateError unless the slice of `entry` lies within `shape`, without overlap."""
    if entry.part is None:
        return
    if len(entry.part) != len(shape):
        raise UpdateError(
            "Invalid slice of {tensor!r}: it has {axes} axes, but {stands_for!r} in the global "
            "model has the shape {shape}.",
            code="update.wrong-slice",
            tensor=entry.name,
            shape=shape,
            axes=len(entry.part),
            stands_for=entry.stands_for,
        )
    for axis, (ranges, size) in enumerate(zip(entry.part, shape, strict=True)):
        _check_ranges(ranges, size, entry.name, axis)


def _check_ranges(ranges: Sequence[tuple[int, int]], size: int, name: str, axis: int) -> None:
    where = f"Invalid slice of {name!r}, axis {axis}"
    if not ranges:
        raise UpdateError(
            "{slice}: it has no range; it must have at least one.",
            code="update.wrong-slice",
            tensor=name,
            axis=axis,
            slice=where,
        )
    for start, stop in ranges:
        if not 0 <= start < stop <= size:
            raise UpdateError(
                "{slice}: the range [{start}, {stop}) is not within the size {size} of the "
                "global parameter.",
                code="update.wrong-slice",
                tensor=name,
                axis=axis,
                range=[start, stop],
                slice=where,
                start=start,
                stop=stop,
                size=size,
            )
    for (_, stop), (start, _) in itertools.pairwise(sorted(ranges)):
        if start < stop:
            raise UpdateError(
                "{slice}: its ranges overlap at {overlap}; each element may occur once.",
                code="update.wrong-slice",
                tensor=name,
                axis=axis,
                overlap=start,
                slice=where,
            )
