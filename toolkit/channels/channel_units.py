"""Tracks the channels that belong together in several axes.

Every index of every axis has a *unit*, a number. If two indices must be kept or dropped together,
they have the same unit. Examples are the same channel of both operands of an addition, and the same
channel in the output of a convolution and in the input of the next convolution. Flattening repeats
units; concatenation appends units.
"""

from collections.abc import Iterable, Set
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

FIXED = 0
"""The unit of indices that are never dropped: batch, image and time axes, inputs, classes."""

Axis = NDArray[np.int64]
"""One unit for each index of an axis."""

Axes = tuple[Axis, ...]

Range = tuple[int, int]
"""[start, stop)."""


def fixed_axis(size: int) -> Axis:
    """An axis that keeps all of its indices."""
    return np.broadcast_to(np.int64(FIXED), (size,))


class Units:
    """A union-find structure over units, and the order of the channels that layers compute."""

    def __init__(self) -> None:
        self.parents = [FIXED]
        self.computed: list[Axis] = []
        self.bounded: list[Axis] = []
        self.repeated: set[int] = set()

    def new_repeated_axis(self, size: int) -> Axis:
        """A new axis along which values repeat.

        If a tensor with this axis is combined with another tensor later, the axis takes the
        channels of that tensor.
        """
        axis = self.new_axis(size)
        self.repeated.update(axis.tolist())
        return axis

    def pin_if_repeated(self, axis: Axis) -> None:
        """Keep every index of `axis` if it is still a repeated axis.

        Values repeat along such an axis, and no other tensor has determined its channels.
        """
        if self.repeated.issuperset(axis.tolist()):
            self.pin(axis)

    def new_axis(self, size: int) -> Axis:
        """An axis of new units."""
        first = len(self.parents)
        self.parents.extend(range(first, first + size))
        return np.arange(first, first + size)

    def join(self, left: Axis, right: Axis) -> None:
        """Unite the units of two axes of equal size, index by index."""
        if left is not right:
            # Flattened axes repeat units many times; unite each pair once.
            for pair in np.unique(np.stack([left, right]), axis=1).T.tolist():
                self.repeated.difference_update(pair)
                low, high = sorted(map(self.root, pair))
                self.parents[high] = low  # The lowest unit is the root, so that FIXED stays a root.

    def pin(self, axis: Axis) -> None:
        """Never drop any index of `axis`."""
        self.join(axis, fixed_axis(len(axis)))

    def add_computed(self, axis: Axis) -> None:
        """Record that a layer computes the channels `axis`, in this order. They may be dropped."""
        self.computed.append(axis)

    def add_boundary(self, axis: Axis) -> None:
        """Record that a ratio applies separately to the channels inside and outside of `axis`."""
        self.bounded.append(axis)

    def root(self, unit: int) -> int:
        """The unit that represents all units united with `unit`."""
        while self.parents[unit] != unit:
            self.parents[unit] = unit = self.parents[self.parents[unit]]
        return unit

    def roots(self, axis: Axis) -> Axis:
        """`axis` with every unit replaced by its root."""
        units, positions = np.unique(axis, return_inverse=True)
        return np.array([self.root(unit) for unit in units.tolist()], dtype=np.int64)[positions]

    def groups(self) -> list[list[int]]:
        """Divide the channels that may be dropped into groups. Each channel is given as its root.

        The ratio of kept channels applies to each group separately.

        Channel b follows channel a in a group if b follows a in every axis that has a or b. For
        example, a network concatenates the outputs of two layers and adds the output of a third
        layer. Then the channels of the third layer form two groups.
        """
        after: dict[int, set[int]] = {}
        before: dict[int, set[int]] = {}
        for axis in (*self.computed, *self.bounded):
            # Repeated units of a flattened axis count once. FIXED at both ends marks the borders.
            order = [unit for unit, _ in groupby([FIXED, *self.roots(axis).tolist(), FIXED])]
            for unit, following in pairwise(order):
                after.setdefault(unit, set()).add(following)
                before.setdefault(following, set()).add(unit)
        # A link is kept only if it is unique in both directions.
        links = {
            unit: following
            for unit, (following, *others) in ((unit, [*units]) for unit, units in after.items())
            if not others and FIXED not in (unit, following) and before[following] == {unit}
        }
        free = dict.fromkeys(unit for axis in self.computed for unit in self.roots(axis).tolist())
        led = {FIXED, *links.values()}
        return [list(chain(links, unit)) for unit in free if unit not in led]

    def without(self, dropped: Set[int]) -> "Kept":
        """The units that stay if all units whose root is in `dropped` are dropped."""
        roots = self.roots(np.arange(len(self.parents)))
        return Kept(np.array([unit not in dropped for unit in roots.tolist()]))


def chain(links: dict[int, int], head: int) -> Iterable[int]:
    """Yield `head`, then `links[head]`, and so on to the end of the chain."""
    unit: int | None = head
    while unit is not None:
        yield unit
        unit = links.get(unit)


class Kept:
    """The units that are kept."""

    def __init__(self, units: NDArray[np.bool_]) -> None:
        self.units = units

    def count(self, axis: Axis) -> int:
        """How many indices of `axis` are kept."""
        return int(self.units[axis].sum())

    def all(self, axis: Axis) -> bool:
        """Whether every index of `axis` is kept."""
        return bool(self.units[axis].all())

    def ranges(self, axis: Axis) -> tuple[Range, ...]:
        """The indices of `axis` that are kept, as ranges in ascending order."""
        # Edges between kept and dropped indices come in pairs of start and stop.
        edges = np.flatnonzero(np.diff(self.units[axis], prepend=False, append=False))
        return tuple((start, stop) for start, stop in edges.reshape(-1, 2).tolist())
