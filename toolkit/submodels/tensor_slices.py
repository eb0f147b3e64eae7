"""Parts of a global parameter: which of its elements an uploaded tensor holds."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from profiles.errors import UpdateError
from toolkit.submodels.submodel import Shapes

Part = tuple[tuple[tuple[int, int], ...], ...]
"""For each axis the ranges [start, stop) that are held, one after the other."""


@dataclass(frozen=True)
class Place:
    """`part` of a tensor of `shape`."""

    shape: tuple[int, ...]
    part: Part

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of a tensor that holds this part."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.part)

    @cached_property
    def index(self) -> tuple[slice, ...] | tuple[Tensor, ...]:
        """What selects the part: slices where every axis has one range, otherwise open indices."""
        if all(len(ranges) == 1 for ranges in self.part):
            return tuple(slice(*ranges[0]) for ranges in self.part)
        axes = [torch.cat([torch.arange(*ends) for ends in ranges]) for ranges in self.part]
        last = len(axes) - 1
        return tuple(axis.reshape(-1, *[1] * (last - n)) for n, axis in enumerate(axes))

    def add(self, target: Tensor, value: Tensor | float, weight: float = 1.0) -> None:
        """target[part] += weight * value, in place; `target` has `shape`, `value` has `sizes`."""
        held = target[self.index]
        held.add_(value, alpha=weight)
        if not isinstance(self.index[0], slice):
            target[self.index] = held


def held(tensor: Tensor, part: Part) -> Tensor:
    """The `part` of a global tensor, its ranges one after the other."""
    for axis, ranges in enumerate(part):
        tensor = torch.cat([tensor.narrow(axis, a, b - a) for a, b in ranges], axis)
    return tensor


def place_of(entry: TensorEntry, shape: tuple[int, ...]) -> Place | None:
    """Where `entry` belongs in its global tensor of `shape`; None for all of it."""
    if entry.part is None or entry.part == tuple(((0, size),) for size in shape):
        return None
    return Place(shape, entry.part)


def held_shape(entry: TensorEntry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of what `entry` (or the factors it is one of) holds of a global tensor of `shape`."""
    place = place_of(entry, shape)
    return shape if place is None else place.sizes


def by_parameter(table: Sequence[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """The entries that stand for each global tensor, in table order."""
    groups: dict[str, list[TensorEntry]] = {}
    for entry in table:
        groups.setdefault(entry.stands_for or "", []).append(entry)
    return groups


def held_shapes(table: Sequence[TensorEntry], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Shape of what a checked table holds of each global tensor that it stands for."""
    return {
        name: held_shape(entries[0], shapes[name]) for name, entries in by_parameter(table).items()
    }


def places(table: Sequence[TensorEntry], shapes: Shapes) -> dict[str, Place]:
    """Where the parts that a table holds belong, by global tensor; none for whole tensors."""
    found = {e.stands_for: place_of(e, shapes[e.stands_for]) for e in table if e.stands_for}
    return {name: place for name, place in found.items() if place is not None}


def numbers_held(entry: TensorEntry, shape: tuple[int, ...]) -> int:
    """How many numbers of a global tensor of `shape` the entry stands for."""
    return math.prod(held_shape(entry, shape))


def check_part(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    """Raise UpdateError unless the part of `entry` lies within `shape` without overlap."""
    if entry.part is None:
        return
    if len(entry.part) != len(shape):
        raise UpdateError(
            f"{entry.name!r} names a part along {len(entry.part)} axes; {entry.stands_for!r} in "
            f"the global model has the shape {shape}."
        )
    for axis, (ranges, size) in enumerate(zip(entry.part, shape, strict=True)):
        _check_ranges(ranges, size, f"{entry.name!r}, axis {axis}")


def _check_ranges(ranges: Sequence[tuple[int, int]], size: int, where: str) -> None:
    if not ranges:
        raise UpdateError(f"{where}: its part has no range; name at least one.")
    for start, stop in ranges:
        if not 0 <= start < stop <= size:
            raise UpdateError(
                f"{where}: the range [{start}, {stop}) is not within the {size} of the global "
                "parameter."
            )
    for (_, stop), (start, _) in itertools.pairwise(sorted(ranges)):
        if start < stop:
            raise UpdateError(f"{where}: its ranges overlap at {start}; name each element once.")
