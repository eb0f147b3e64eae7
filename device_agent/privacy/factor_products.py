"""The tensors in a secure sum: low-rank factors are replaced by their products.

An aggregation needs the mean of the products, and this mean is not the product of the mean factors.
So a device adds the change of the product U V^T to the sum. The product has as many numbers as the
dense weight.

Let r be the rank. The factors of a convolution with `groups` groups have the shapes U (groups * r,
m, kh, 1) and V (n, r, 1, kw), and their product has the shape (n, m, kh, kw). For 1-D convolutions,
the factors have the shapes (groups * r, m, k) and (n, r, 1). For matrices, the factors have the
shapes (r, m) and (n, r).
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from device_agent.formats.manifest import TensorEntry

Pair = tuple[TensorEntry, TensorEntry]


def summed_table(table: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
    """The tensors in a secure sum of updates with the tensors in `table`, in the same order.

    A product has the position of its factor U and the name of the parameter.
    """
    pairs = _pairs(table)
    products = {pair[0].name: _product_entry(*pair) for pair in pairs}
    second = {v.name for _, v in pairs}
    return tuple(products.get(entry.name, entry) for entry in table if entry.name not in second)


def summed_tensors(
    arrays: Mapping[str, np.ndarray], table: Sequence[TensorEntry]
) -> Iterator[np.ndarray]:
    """Compute the tensors of `summed_table(table)` in float64 from the tensors in `table`."""
    pairs = {u.name: v.name for u, v in _pairs(table)}
    second = set(pairs.values())
    for entry in table:
        if entry.name in pairs:
            yield _product(arrays[entry.name], arrays[pairs[entry.name]])
        elif entry.name not in second:
            yield arrays[entry.name].astype(np.float64)


def _pairs(table: Sequence[TensorEntry]) -> list[Pair]:
    """The entries of U and V of each factorized parameter."""
    sides = {(entry.stands_for, entry.factor): entry for entry in table}
    return [(u, sides[name, "v"]) for (name, side), u in sides.items() if side == "u"]


def _product_entry(u: TensorEntry, v: TensorEntry) -> TensorEntry:
    assert u.stands_for is not None
    shape = (v.shape[0], *u.shape[1:3], *v.shape[3:])
    return msgspec.structs.replace(u, name=u.stands_for, shape=shape, factor=None)


def _product(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    rank = v.shape[1]
    groups, rows = u.shape[0] // rank, u.shape[1:3]
    outputs, columns = v.shape[0] // groups, v.shape[3:]
    left = u.astype(np.float64).reshape(groups, rank, -1)
    right = v.astype(np.float64).reshape(groups, outputs, rank, -1).swapaxes(2, 3)
    product = right.reshape(groups, -1, rank) @ left  # (groups, outputs * kw, m * kh)
    product = product.reshape(groups * outputs, -1, int(np.prod(rows))).swapaxes(1, 2)
    return product.reshape(groups * outputs, *rows, *columns)
