"""Measures the difference between the results of a graph and the correct results."""

import math

import torch
from torch import Tensor

ROUNDING = 1e-4
"""The least size by which an error is divided: a tensor whose elements are smaller, or a change
that is a smaller share of its tensor, may be only rounding. The number is a typical rounding error
divided by the tolerance.
"""

PART = 2**18
"""Elements of a tensor that are converted to float64 at once."""

HUGE = 1e30
"""Numbers above this stand for infinity, for example where attention is masked."""


def relative_error(actual: Tensor, expected: Tensor, before: Tensor | None = None) -> float:
    """Norm of the difference divided by that of `expected`. Infinite if `actual` is not finite.

    For state, `before` is the value before the step, and the error is relative to the change of the
    value in the step. Relative to the weights, the error of a wrong gradient times a learning rate
    would look small. Some tensors and changes are zero except for rounding, such as the gradient of
    a bias before a batch norm. An absolute bound (ROUNDING) applies to these.
    """
    difference = norm_of_difference(actual, expected)
    if not difference < float("inf"):
        return float("inf")
    size = norm(expected)
    # The norm of a tensor whose elements are all as large as ROUNDING.
    floor: float = ROUNDING * max(1.0, expected.numel()) ** 0.5
    if before is None:
        return difference / max(size, floor)
    change = norm_of_difference(expected, before)
    return difference / max(change, ROUNDING * size, floor)


def distance(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Norm of the difference, and norm of `expected`, for values that float32 can express.

    Elements that are huge or nan in both tensors count as equal. If an element is huge or nan in
    only one tensor, the difference is infinite.
    """
    difference, size = norm_of_difference(actual, expected), norm(expected)
    if difference < HUGE and size < HUGE:
        return difference, size
    # Convert both to float32, so that values that overflow or vanish there do so on both sides.
    left, right = actual.float().double(), expected.float().double()
    left_huge, right_huge = ~(left.abs() <= HUGE), ~(right.abs() <= HUGE)
    signs = [value[right_huge].nan_to_num(0).sign() for value in (left, right)]
    if not torch.equal(left_huge, right_huge) or not torch.equal(*signs):
        return float("inf"), 1.0
    left, right = left.masked_fill(right_huge, 0), right.masked_fill(right_huge, 0)
    return (left - right).norm().item(), right.norm().item()


def norm(value: Tensor) -> float:
    """The norm of `value`, summed in float64."""
    numbers = value if value.is_floating_point() else value.double()
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64))


def norm_of_difference(left: Tensor, right: Tensor) -> float:
    """The norm of `left` - `right` in float64, computed in parts to save memory.

    The norm is infinite if the numbers of elements differ.
    """
    if left.numel() != right.numel():
        return float("inf")
    total, flat, other = 0.0, left.reshape(-1), right.reshape(-1)
    for start in range(0, flat.numel(), PART):
        part = slice(start, start + PART)
        total += float((flat[part].double() - other[part].double()).square().sum())
    return math.sqrt(total)
