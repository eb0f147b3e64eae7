"""A weighted sum of many tensors in float32, nearly as accurate as one in float64."""

import torch
from torch import Tensor

from toolkit.submodels.matrix_product import Product, inverse
from toolkit.submodels.tensor_slices import TensorSlice

CARRY = 32
"""Additions before the low part is carried. Each rounds by at most 2^-24 of the low part."""

PIECE = 1 << 16
"""Numbers carried at a time, so that the temporary stays in the cache."""


class RunningSum:
    """The sum of weight * value over all additions, kept as high + low.

    Additions go to `low`. After every CARRY additions its leading part moves to `high` and the
    rounding remainder stays (Dekker's fast two-sum). Only additions within one run of CARRY round,
    however many there are. Products are added by the matrix product itself, without a temporary.
    In both parts the axes in the order `axes` are contiguous in memory; for products these are
    their rows and columns.
    """

    def __init__(self, shape: tuple[int, ...], axes: tuple[int, ...] | None = None) -> None:
        self.axes = axes or tuple(range(len(shape)))
        contiguous = torch.zeros([shape[axis] for axis in self.axes])
        self.low = contiguous.permute(inverse(self.axes))
        self.high: Tensor | None = None
        self.additions = 0

    @classmethod
    def of(cls, low: Tensor, high: Tensor | None) -> "RunningSum":
        """The sum low + high of contiguous tensors, whose memory it takes."""
        found = cls(())
        found.axes, found.low, found.high = tuple(range(low.dim())), low, high
        return found

    def add(self, value: Tensor | Product, weight: float, place: TensorSlice | None = None) -> None:
        """Add `weight` * `value`, at `place` if it is a part of the sum's shape."""
        if isinstance(value, Product) and place is None:
            self._set_layout(value.axes)
            u, v = value.matrices()
            self.low.permute(self.axes).view(u.shape[0], -1).addmm_(u, v, alpha=weight)
        else:
            tensor = value.dense() if isinstance(value, Product) else value
            if place is None:
                self.low.add_(tensor, alpha=weight)
            else:
                place.add_to(self.low, tensor, weight)
        self.additions += 1
        if self.additions % CARRY == 0:
            self.carry()

    def merge(self, other: "RunningSum") -> None:
        """Add the sum of `other`."""
        for part in (other.high, other.low):
            if part is not None:
                self.carry()
                self.low += part

    def carry(self) -> None:
        """high, low = the rounded high + low, and the rounding remainder."""
        if self.high is None:
            self.high, self.low = self.low, torch.zeros_like(self.low)
            return
        highs, lows = (part.permute(self.axes).view(-1) for part in (self.high, self.low))
        for start in range(0, len(lows), PIECE):
            high, low = highs[start : start + PIECE], lows[start : start + PIECE]
            remainder = high.clone()
            high += low
            remainder -= high
            low += remainder

    def total(self) -> Tensor:
        """The sum so far, float32."""
        return self.low.clone() if self.high is None else self.low + self.high

    def take(self) -> Tensor:
        """The sum as `total` gives it, contiguous, in the sum's own memory. This ends the sum."""
        if self.high is None:
            return self.low.contiguous()
        self.low += self.high
        return self.high.permute(self.axes).view(self.low.shape).copy_(self.low)

    def _set_layout(self, axes: tuple[int, ...]) -> None:
        """Make the axes in the order `axes` contiguous."""
        if axes != self.axes:
            back = inverse(axes)
            self.low = self.low.permute(axes).contiguous().permute(back)
            if self.high is not None:
                self.high = self.high.permute(axes).contiguous().permute(back)
            self.axes = axes
