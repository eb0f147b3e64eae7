"""A weighted sum of tensors in float64."""

import torch
from torch import Tensor

from toolkit.submodels.matrix_product import Product
from toolkit.submodels.tensor_slices import TensorSlice

PIECE = 1 << 16
"""Numbers that are added at a time."""


class RunningSum:
    """The sum of weight * value over all additions of float32 values of `shape`.

    Each addition rounds by at most 2^-53 of the sum. The mean of n equal values, which divides by
    the sum of weights, is therefore off by about n * 2^-53: less than half of a float32 digit for
    any n below 2^27, so that in float32 it is that value, bit for bit.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.total = torch.zeros(shape, dtype=torch.float64)

    @classmethod
    def of(cls, low: Tensor, high: Tensor | None) -> "RunningSum":
        """The sum low + high of float32 tensors, as `parts` gives them."""
        found = cls(())
        found.total = low.double() if high is None else low.double() + high.double()
        return found

    def add(self, value: Tensor | Product, weight: float, place: TensorSlice | None = None) -> None:
        """Add `weight` * `value`, at `place` if it is a part of the sum's shape."""
        tensor = value.dense() if isinstance(value, Product) else value
        if place is None:
            # In pieces, because PyTorch makes a float64 copy of what it adds.
            sums, values = self.total.view(-1), tensor.reshape(-1)
            for start in range(0, len(sums), PIECE):
                sums[start : start + PIECE].add_(values[start : start + PIECE], alpha=weight)
        else:
            place.add_to(self.total, tensor, weight)

    def merge(self, other: "RunningSum") -> None:
        """Add the sum of `other`."""
        self.total += other.total

    def parts(self) -> tuple[Tensor, Tensor]:
        """The sum as low + high in float32: high is the rounded sum, and low what that lacks.

        Together they are exact to 2^-48, which keeps the mean of equal values exact.
        """
        high = self.total.float()
        return (self.total - high).float(), high
