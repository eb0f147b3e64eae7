"""Transposes many small matrices by the operators that bring images into blocks of channels.

ONNX Runtime's Transpose synchronizes its threads after each matrix. So it takes 1.3 ms for 512
matrices of 3 x 128 numbers. The operators used here take 0.2 ms.
"""

import math
from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir import Node, Value

from exporters.memory.liveness import is_view
from exporters.onnx.forms.blocked_values import BlockedValues
from exporters.onnx.graph_reading import DOMAIN, dims_of, sizes_of

LEAST_MATRICES = 16
"""The Transpose operator is as fast for fewer matrices."""


def matrices(layout: BlockedValues, node: Node) -> bool:
    """Convert a transposition of (A, X, Y) to (A, Y, X). Each letter may stand for several axes."""
    (value,), result = node.inputs, node.outputs[0]
    if value is None or value in layout.images or value.dtype != ir.DataType.FLOAT:
        return False
    if None in dims_of(value) or is_view(node):
        return False  # the runtime reads the matrix by columns
    shape = matrices_of(sizes_of(value), node.attributes["perm"].as_ints())
    if (
        shape is None
        or shape[0] < LEAST_MATRICES
        or not any(n % layout.block == 0 for n in shape[1:])
    ):
        return False
    turned = turned_matrices(layout, layout.plain(value), *shape)
    return layout.replaced(result, layout.reshaped(turned, *sizes_of(result)))


def matrices_of(sizes: Sequence[int], axes: Sequence[int]) -> tuple[int, int, int] | None:
    """Return (A, X, Y) if a tensor of `sizes` (A, X, Y) becomes (A, Y, X) in the order `axes`.

    Each letter may stand for several axes. Returns None for other orders.

    >>> matrices_of([64, 3, 3, 32], [0, 3, 1, 2])
    (64, 9, 32)
    """
    kept = [axis for axis in axes if sizes[axis] > 1]
    ordered = sorted(kept)
    ahead = next((n for n, (a, b) in enumerate(zip(kept, ordered, strict=True)) if a != b), None)
    moved, rest = kept[ahead:], ordered[ahead:]
    cut = next((n for n in range(1, len(moved)) if moved[n:] + moved[:n] == rest), None)
    if ahead is None or cut is None:
        return None
    count, columns, rows = (
        math.prod(sizes[axis] for axis in part) for part in (kept[:ahead], moved[:cut], moved[cut:])
    )
    return count, rows, columns


def turned_matrices(
    layout: BlockedValues, value: Value, count: int, rows: int, columns: int
) -> Value:
    """Transpose the matrices `value` (count, rows, columns) to (count, columns, rows)."""
    b = layout.block
    if columns % b == 0:
        image = layout.reshaped(value, count, 1, rows, columns)
        last, shape = {"channels_last": 1}, (count, columns, 1, rows)
        blocks = layout.add("ReorderInput", [image], last, shape=shape, domain=DOMAIN)
        turned = layout.out_of_blocks(blocks, shape, columns)
    else:
        image = layout.reshaped(value, count, rows, 1, columns)
        blocks = layout.in_blocks(image)
        last, shape = {"channels": rows, "channels_last": 1}, (count, 1, columns, rows)
        turned = layout.add("ReorderOutput", [blocks], last, shape=shape, domain=DOMAIN)
    return layout.reshaped(turned, count, columns, rows)
