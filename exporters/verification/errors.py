"""The distance between what a graph computed and what is right."""

import torch
from torch import Tensor

ROUNDING = 1e-4
"""Tensors below this size, and changes below this share of their tensor, are rounding divided by
the tolerance."""

HUGE = 1e30
"""Numbers above this stand for infinity, for example where attention is masked."""


def relative_error(came: Tensor, expected: Tensor, before: Tensor | None = None) -> float:
    """Norm of the difference relative to the norm of `expected`; infinite if `came` is not finite.

    The error of state is relative to its change since `before`: a wrong gradient times a learning
    rate would be small relative to the weights. An absolute bound applies to tensors that are zero
    except for rounding, such as the gradient of a bias before a batch norm, and to changes of that
    size.
    """
    right = expected.double()
    difference: float = (came.double() - right).norm().item()
    if not difference < float("inf"):
        return float("inf")
    size: float = right.norm().item()
    # The norm of a tensor whose elements are all as large as ROUNDING.
    floor: float = ROUNDING * max(1.0, expected.numel()) ** 0.5
    if before is None:
        return difference / max(size, floor)
    change: float = (right - before.double()).norm().item()
    return difference / max(change, ROUNDING * size, floor)


def distance(came: Tensor, expected: Tensor) -> tuple[float, float]:
    """Norm of the difference, and norm of `expected`, as float32 can express both.

    Where both are huge or no number, they count as equal. The difference is infinite if only one
    is.
    """
    right = expected.double()
    difference, size = (came.double() - right).norm().item(), right.norm().item()
    if difference < HUGE and size < HUGE:
        return difference, size
    # Through float32, so that what overflows or vanishes in float32 does so on both sides.
    left, right = came.float().double(), expected.float().double()
    left_huge, right_huge = ~(left.abs() <= HUGE), ~(right.abs() <= HUGE)
    signs = [value[right_huge].nan_to_num(0).sign() for value in (left, right)]
    if not torch.equal(left_huge, right_huge) or not torch.equal(*signs):
        return float("inf"), 1.0
    left, right = left.masked_fill(right_huge, 0), right.masked_fill(right_huge, 0)
    return (left - right).norm().item(), right.norm().item()
