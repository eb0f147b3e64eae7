"""A weighted sum of tensors in float64."""

import torch
from torch import Tensor

from toolkit.submodels.matrix_product import Product
from toolkit.submodels.tensor_slices import TensorSlice

PIECE = 1 << 16
"""How many numbers are added at a time."""


class RunningSum:
    """The sum of weight * value over all additions of float32 values of `shape`.

    Each addition rounds by at most 2^-53 of the sum. The mean of n equal values therefore has a
    relative error of about n * 2^-53. If n is below 2^27, this is less than half a unit in the last
    place of float32. So the mean, rounded to float32, equals the value bit for bit.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.total = torch.zeros(shape, dtype=torch.float64)

    @classmethod
    def of(cls, low: Tensor, high: Tensor | None) -> "RunningSum":
        """Restore the sum low + high from the float32 tensors of `parts`."""
        restored = cls(())
        restored.total = low.double() if high is None else low.double() + high.double()
        return restored

    def add(self, value: Tensor | Product, weight: float, part: TensorSlice | None = None) -> None:
        """Add `weight` * `value`. If `value` is only a part of the tensor, `part` is its slice."""
        tensor = value.dense() if isinstance(value, Product) else value
        if part is None:
            # In pieces, because PyTorch makes a float64 copy of what it adds.
            sums, values = self.total.view(-1), tensor.reshape(-1)
            for start in range(0, len(sums), PIECE):
                sums[start : start + PIECE].add_(values[start : start + PIECE], alpha=weight)
        else:
            part.add_to(self.total, tensor, weight)

    def merge(self, other: "RunningSum") -> None:
        """Add the sum of `other`."""
        self.total += other.total

    def parts(self) -> tuple[Tensor, Tensor]:
        """The sum as float32 tensors (low, high): high is the rounded sum, and low is the rest.

        low + high has a relative error of at most 2^-48, so the mean of equal values stays exact.
        """
        high = self.total.float()
        return (self.total - high).float(), high
