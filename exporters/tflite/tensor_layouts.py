"""Values of a traced graph during lowering: a TFLite tensor, its layout and its ATen shape.

In TFLite, the channels of an image are the last axis. In ATen, they come before the pixels. So each
value stores its layout. A permute changes only the layout. Elements move only when an operator
needs the axes in order. An image keeps its channels last from one convolution to the next. A
broadcast value keeps its small tensor until an operator needs all elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import sympy

from exporters.tflite.flatbuffer import Size, Subgraph, Tensor, open_size

IMAGE = (0, 3, 1, 2)
"""The position of each axis of (N, C, H, W) in TFLite's images (N, H, W, C)."""

MAX_STORED_ONES = 4096
"""Largest constant of ones that a broadcast may add to the file, in elements."""


class UnsupportedError(Exception):
    """An operator is used in a way that TFLite cannot represent. The message names the use.

    `lowering.call` turns this error into an ExportError with the operator, its place and a remedy.
    """


@dataclass(frozen=True)
class Value:
    """An ATen value whose axis `a` is axis `order[a]` of `tensor`.

    `shape` is ATen's shape. If an axis has size one in the tensor but another size in `shape`, the
    value is repeated along this axis.
    """

    tensor: Tensor
    shape: tuple[Size, ...]
    order: tuple[int, ...]

    @classmethod
    def plain(cls, tensor: Tensor) -> "Value":
        """Make the value that has the axes and elements of `tensor`, in the same order."""
        return cls(tensor, tensor.shape, tuple(range(len(tensor.shape))))

    @property
    def stored_shape(self) -> tuple[Size, ...]:
        """Sizes of the tensor's axes, in ATen's order."""
        return tuple(self.tensor.shape[axis] for axis in self.order)

    @property
    def in_order(self) -> bool:
        """Whether the tensor stores the axes in ATen's order."""
        return self.order == tuple(range(len(self.order)))

    def permuted(self, axes: Sequence[int]) -> "Value":
        """ATen's permute. No element moves."""
        axes = [a % len(self.order) for a in axes]
        return Value(
            self.tensor, tuple(self.shape[a] for a in axes), tuple(self.order[a] for a in axes)
        )

    def expanded(self, shape: Sequence[Size]) -> "Value":
        """ATen's expand to `shape` of the same rank. No element is copied."""
        return Value(self.tensor, tuple(shape), self.order)


class Layouts:
    """Converts values of one subgraph to the layouts that operators need."""

    def __init__(self, graph: Subgraph) -> None:
        self.graph = graph
        self.batch: Tensor | None = None  # int32 of one element
        self._before: dict[int, Tensor] = {}  # index of a reshape's result -> the reshaped tensor

    def integers(self, values: Sequence[int]) -> Tensor:
        """Add a constant vector of int32."""
        return self.graph.constant(np.asarray(values, np.int32).reshape(len(values)))

    def reshape(self, tensor: Tensor, shape: Sequence[Size]) -> Tensor:
        """Reshape `tensor`. At most one size may be open. Consecutive reshapes become one."""
        tensor = self._before.get(tensor.index, tensor)
        if tuple(shape) == tensor.shape:
            return tensor
        if sum(map(open_size, shape)) > 1:
            # RESHAPE computes one unknown size, which the file marks with -1.
            return self._with_ones(tensor, shape)
        sizes = [-1 if open_size(n) else int(n) for n in shape]
        result = self.graph.operator(
            "RESHAPE",
            [tensor, self.integers(sizes)],
            tensor.dtype,
            shape,
            "ReshapeOptions",
            newShape=tuple(sizes),
        )
        self._before[result.index] = tensor
        return result

    def _with_ones(self, tensor: Tensor, shape: Sequence[Size]) -> Tensor:
        """Add or remove axes of size one. Several sizes of `tensor` may be open."""
        ones = [axis for axis, size in enumerate(tensor.shape) if size == 1]
        sizes = [size for size in tensor.shape if size != 1]
        if sizes != [size for size in shape if size != 1]:
            raise UnsupportedError("a reshape to two sizes that depend on the batch")
        if ones:
            tensor = self.graph.operator(
                "SQUEEZE", [tensor], tensor.dtype, sizes, "SqueezeOptions", squeezeDims=tuple(ones)
            )
        for axis, size in enumerate(shape):
            if size == 1:
                sizes.insert(axis, 1)
                read = [tensor, self.integers([axis])]
                tensor = self.graph.operator(
                    "EXPAND_DIMS", read, tensor.dtype, sizes, "ExpandDimsOptions"
                )
        return tensor

    def transpose(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        """Transpose `tensor`, so that axis `axes[i]` becomes axis i.

        If only axes of size one move, the result is a reshape. Axes that stay adjacent are merged
        and move as one, because XNNPACK (LiteRT's fast library) transposes at most six axes.
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
        order = self.integers([before.index(run) for run in runs])
        moved = self.graph.operator(
            "TRANSPOSE", [merged, order], tensor.dtype, sizes, "TransposeOptions"
        )
        return self.reshape(moved, shape)

    def arranged(self, value: Value, order: Sequence[int]) -> Tensor:
        """Transpose the tensor of `value` so that ATen's axis a becomes its axis `order[a]`.

        Elements that repeat along an axis are not copied.
        """
        axes = [0] * len(order)
        for axis, stored in enumerate(order):
            axes[stored] = value.order[axis]
        return self.transpose(value.tensor, axes)

    def dense(self, value: Value, order: Sequence[int] | None = None) -> Tensor:
        """The tensor with all elements of `value`, in the layout `order` (default: ATen's)."""
        order = tuple(range(len(value.shape))) if order is None else order
        tensor = self.arranged(value, order)
        shape: list[Size] = [0] * len(order)
        for axis, stored in enumerate(order):
            shape[stored] = value.shape[axis]
        return self.broadcast(tensor, shape)

    def materialized(self, value: Value) -> Value:
        """Store all elements of `value`. The layout does not change."""
        return Value(self.dense(value, value.order), value.shape, value.order)

    def broadcast(self, tensor: Tensor, shape: Sequence[Size]) -> Tensor:
        """Repeat `tensor` to `shape`, which has the same rank.

        XNNPACK (LiteRT's fast library) has no BROADCAST_TO. So if there are few elements, a float32
        tensor is multiplied by ones.
        """
        if tensor.shape == tuple(shape):
            return tensor
        repeats = [
            1 if have == want else want for have, want in zip(tensor.shape, shape, strict=True)
        ]
        fixed = not any(map(open_size, repeats))
        if fixed and tensor.dtype == "float32" and product(repeats) <= MAX_STORED_ONES:
            ones = self.graph.constant(np.ones([int(n) for n in repeats], np.float32))
            return self.graph.operator("MUL", [tensor, ones], "float32", shape, "MulOptions")
        return self.graph.operator(
            "BROADCAST_TO",
            [tensor, self.sizes(shape)],
            tensor.dtype,
            shape,
            "BroadcastToOptions",
        )

    def sizes(self, shape: Sequence[Size]) -> Tensor:
        """Return `shape` as a vector of int32. Open sizes are computed at run time."""
        if not any(map(open_size, shape)):
            return self.integers([int(n) for n in shape])
        parts = [self.open_size(n) if open_size(n) else self.integers([int(n)]) for n in shape]
        if len(parts) == 1:
            return parts[0]
        return self.graph.operator(
            "CONCATENATION", parts, "int32", (len(parts),), "ConcatenationOptions", axis=0
        )

    def open_size(self, size: sympy.Expr) -> Tensor:
        """Compute `size`, a multiple of the batch size, as a vector of one int32."""
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
        """ATen's reshape to `shape`.

        Axes may stay in another order if the tensor stores the axes of each block (see `matching`)
        side by side.
        """
        if all(size == 1 for size in value.stored_shape):  # one repeated number
            small = self.reshape(value.tensor, [1] * len(shape))
            return Value(small, tuple(shape), tuple(range(len(shape))))
        value = self.materialized(value) if value.stored_shape != value.shape else value
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
    """Whether the tensor stores `axes` in this order and next to each other.

    Axes of size one are ignored.
    """
    stored = [value.order[a] for a in axes if value.shape[a] != 1]
    if not stored:
        return True
    between = range(stored[0], stored[-1] + 1)
    held = [p for p in between if value.tensor.shape[p] != 1]
    return held == stored


def first_place(value: Value, axes: Sequence[int]) -> int:
    """The tensor's axis that stores the first of `axes`. -1 (sorts first) if `axes` is empty."""
    return value.order[axes[0]] if axes else -1


def matching(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Divide the axes of `old` and `new` into the smallest blocks with equal numbers of elements.

    Axes of `old` with size one are in no block. An axis of `new` with size one is in the block of
    the axis before it. Leading axes of size one are the first block.
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
    """Number of elements along `axes` of `shape`."""
    return product([shape[a] for a in axes])


def smaller(first: Size, second: Size) -> bool:
    """Whether `first` is less than `second` for every large batch."""
    quotient = sympy.cancel(sympy.sympify(first) / sympy.sympify(second))
    # Open sizes are expressions, which Python cannot compare. A large batch decides.
    large = dict.fromkeys(quotient.free_symbols, 10**9)
    return bool(quotient.subs(large) < 1)


def product(sizes: Sequence[Size]) -> Size:
    """Product of `sizes`: an int if it does not depend on the batch."""
    result = prod(sizes)
    return int(result) if isinstance(result, sympy.Integer) else result
