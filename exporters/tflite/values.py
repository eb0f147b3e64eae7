"""Values of a traced graph while it becomes TFLite operators.

TFLite's images are channels last, ATen's channels first. A value therefore carries its layout: a
permutation of an ATen value costs nothing until an operator needs its axes in order, and an image
stays channels last from one convolution to the next. Broadcast values stay as small as they are
until an operator needs all of their elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import sympy

from exporters.tflite.flatbuffer import Size, Subgraph, Tensor, open_size

IMAGE = (0, 3, 1, 2)
"""Where (N, C, H, W) are in TFLite's images (N, H, W, C)."""

SMALL = 4096
"""Elements up to which ones are stored."""


class UnsupportedError(Exception):
    """An operator used in a way that has no TFLite form; says how it is used.

    The writer adds the operator, its place and what to do, as an ExportError.
    """


@dataclass(frozen=True)
class Value:
    """An ATen value whose axis `a` is axis `order[a]` of `tensor`.

    `shape` is ATen's; where the tensor's axis has size one instead, the value repeats along it.
    """

    tensor: Tensor
    shape: tuple[Size, ...]
    order: tuple[int, ...]

    @classmethod
    def plain(cls, tensor: Tensor) -> "Value":
        """The value that `tensor` holds as it is."""
        return cls(tensor, tensor.shape, tuple(range(len(tensor.shape))))

    @property
    def held(self) -> tuple[Size, ...]:
        """Sizes of the tensor in ATen's order of the axes."""
        return tuple(self.tensor.shape[place] for place in self.order)

    @property
    def in_order(self) -> bool:
        """Whether the tensor's axes are ATen's."""
        return self.order == tuple(range(len(self.order)))

    def permuted(self, axes: Sequence[int]) -> "Value":
        """ATen's permute: nothing moves."""
        axes = [a % len(self.order) for a in axes]
        return Value(
            self.tensor, tuple(self.shape[a] for a in axes), tuple(self.order[a] for a in axes)
        )

    def expanded(self, shape: Sequence[Size]) -> "Value":
        """ATen's expand to `shape` of the same rank: nothing is copied."""
        return Value(self.tensor, tuple(shape), self.order)


class Layouts:
    """Brings values into the layout that an operator needs, on one subgraph."""

    def __init__(self, graph: Subgraph) -> None:
        self.graph = graph
        self.batch: Tensor | None = None  # int32 of one element
        self._before: dict[int, Tensor] = {}  # what a reshaped tensor was before

    def integers(self, values: Sequence[int]) -> Tensor:
        """A constant list of int32."""
        return self.graph.constant(np.asarray(values, np.int32).reshape(len(values)))

    def reshape(self, tensor: Tensor, shape: Sequence[Size]) -> Tensor:
        """`tensor` with other sizes; at most one of them is open. Reshapes in a row are one."""
        tensor = self._before.get(tensor.index, tensor)
        if tuple(shape) == tensor.shape:
            return tensor
        if sum(map(open_size, shape)) > 1:
            raise UnsupportedError("a reshape to two sizes that depend on the batch")
        sizes = [-1 if open_size(n) else int(n) for n in shape]
        made = self.graph.operator(
            "RESHAPE",
            [tensor, self.integers(sizes)],
            tensor.dtype,
            shape,
            "ReshapeOptions",
            newShape=tuple(sizes),
        )
        self._before[made.index] = tensor
        return made

    def transpose(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        """`tensor` with axis `axes[i]` as axis i; a reshape where only axes of size one move.

        Axes that stay neighbours move as one: XNNPACK takes six.
        """
        shape = [tensor.shape[a] for a in axes]
        runs: list[list[int]] = []
        for axis in (a for a in axes if tensor.shape[a] != 1):
            if (
                runs
                and all(tensor.shape[a] == 1 for a in range(runs[-1][-1] + 1, axis))
                and (axis > runs[-1][-1])
            ):
                runs[-1].append(axis)
            else:
                runs.append([axis])
        before = sorted(runs)
        if runs == before:
            return self.reshape(tensor, shape)
        sizes = [product([tensor.shape[a] for a in run]) for run in runs]
        merged = self.reshape(tensor, [product([tensor.shape[a] for a in run]) for run in before])
        places = self.integers([before.index(run) for run in runs])
        moved = self.graph.operator(
            "TRANSPOSE", [merged, places], tensor.dtype, sizes, "TransposeOptions"
        )
        return self.reshape(moved, shape)

    def arranged(self, value: Value, order: Sequence[int]) -> Tensor:
        """The tensor of `value` with ATen's axis a as axis `order[a]`, still unexpanded."""
        axes = [0] * len(order)
        for axis, place in enumerate(order):
            axes[place] = value.order[axis]
        return self.transpose(value.tensor, axes)

    def dense(self, value: Value, order: Sequence[int] | None = None) -> Tensor:
        """The tensor of `value`, all elements, in `order` (default: ATen's)."""
        order = tuple(range(len(value.shape))) if order is None else order
        tensor = self.arranged(value, order)
        shape: list[Size] = [0] * len(order)
        for axis, place in enumerate(order):
            shape[place] = value.shape[axis]
        return self.broadcast(tensor, shape)

    def full(self, value: Value) -> Value:
        """`value` with all of its elements, in the layout it has."""
        return Value(self.dense(value, value.order), value.shape, value.order)

    def broadcast(self, tensor: Tensor, shape: Sequence[Size]) -> Tensor:
        """`tensor` repeated to `shape`, which has the same rank; by ones where that is small.

        XNNPACK takes no BROADCAST_TO.
        """
        if tensor.shape == tuple(shape):
            return tensor
        if not any(map(open_size, shape)) and tensor.dtype == "float32" and product(shape) <= SMALL:
            ones = self.graph.constant(np.ones([int(n) for n in shape], np.float32))
            return self.graph.operator("MUL", [tensor, ones], "float32", shape, "MulOptions")
        return self.graph.operator(
            "BROADCAST_TO",
            [tensor, self.sizes(shape)],
            tensor.dtype,
            shape,
            "BroadcastToOptions",
        )

    def sizes(self, shape: Sequence[Size]) -> Tensor:
        """`shape` as a list of int32, computed where it is open."""
        if not any(map(open_size, shape)):
            return self.integers([int(n) for n in shape])
        parts = [self.open_size(n) if open_size(n) else self.integers([int(n)]) for n in shape]
        if len(parts) == 1:
            return parts[0]
        return self.graph.operator(
            "CONCATENATION", parts, "int32", (len(parts),), "ConcatenationOptions", axis=0
        )

    def open_size(self, size: sympy.Expr) -> Tensor:
        """A multiple of the batch as one int32."""
        (symbol,) = size.free_symbols
        factor = sympy.cancel(size / symbol)
        if not factor.is_Integer:
            raise UnsupportedError(f"a size of {size} for a batch of {symbol}")
        assert self.batch is not None
        if factor == 1:
            return self.batch
        return self.graph.operator(
            "MUL", [self.batch, self.integers([int(factor)])], "int32", (1,), "MulOptions"
        )

    def reshaped(self, value: Value, shape: Sequence[Size]) -> Value:
        """ATen's reshape. Axes that are split or joined among themselves may stay permuted."""
        if all(size == 1 for size in value.held):  # one number, however often it is repeated
            small = self.reshape(value.tensor, [1] * len(shape))
            return Value(small, tuple(shape), tuple(range(len(shape))))
        value = self.full(value) if value.held != value.shape else value
        blocks = matching(value.shape, shape)
        if not all(adjacent(value, inner) for inner, _ in blocks):
            value = Value.plain(self.dense(value))
        sizes: list[Size] = []
        order = [0] * len(shape)
        for _, outer in sorted(blocks, key=lambda block: first_place(value, block[0])):
            for axis in outer:
                order[axis] = len(sizes)
                sizes.append(shape[axis])
        return Value(self.reshape(value.tensor, sizes), tuple(shape), tuple(order))


def adjacent(value: Value, axes: Sequence[int]) -> bool:
    """Whether the tensor holds `axes` one after the other, but for axes of size one."""
    places = [value.order[a] for a in axes if value.shape[a] != 1]
    if not places:
        return True
    between = range(places[0], places[-1] + 1)
    held = [p for p in between if value.tensor.shape[p] != 1]
    return held == places


def first_place(value: Value, axes: Sequence[int]) -> int:
    """Where the tensor holds the first of `axes`; ahead of all others where there are none."""
    return value.order[axes[0]] if axes else -1


def matching(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of axes of `old` and `new` that hold the same number of elements.

    Axes of size one are left out of `old`'s runs; those of `new` stay behind the axis ahead of
    them, leading ones in a run of their own.
    """
    blocks: list[tuple[list[int], list[int]]] = [([], [])]
    ahead = [axis for axis, size in enumerate(old) if size != 1]
    for axis, size in enumerate(new):
        inner, outer = blocks[-1]
        if size == 1:
            outer.append(axis)
            continue
        if inner_size(old, inner) == inner_size(new, outer):
            inner, outer = [ahead.pop(0)], []
            blocks.append((inner, outer))
        outer.append(axis)
        while smaller(inner_size(old, inner), inner_size(new, outer)):
            inner.append(ahead.pop(0))
    return blocks


def inner_size(shape: Sequence[Size], axes: Sequence[int]) -> Size:
    """Elements of the axes `axes` of `shape`."""
    return product([shape[a] for a in axes])


def smaller(one: Size, other: Size) -> bool:
    """Whether `one` has fewer elements than `other`, for any batch large enough."""
    quotient = sympy.cancel(sympy.sympify(one) / sympy.sympify(other))
    large = dict.fromkeys(quotient.free_symbols, 10**9)
    return bool(quotient.subs(large) < 1)


def product(sizes: Sequence[Size]) -> Size:
    """Product of `sizes`; an int where it can be."""
    result = prod(sizes)
    return int(result) if isinstance(result, sympy.Integer) else result
