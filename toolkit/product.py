"""A tensor that is a matrix product and may stay one until it is added to a sum."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Product:
    """u @ v, read as a dense tensor of `shape`.

    u: (p, r), v: (r, q). Rows and columns of the product are the dense tensor's axes in the order
    `axes`: FedHM unrolls a convolution (n, m, kh, kw) to (m * kh, n * kw), `axes` (1, 2, 0, 3).
    Raises ValueError where u, v and `shape` do not fit.
    """

    u: Tensor
    v: Tensor
    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.u.dim() != 2 or self.v.dim() != 2:
            raise ValueError(f"factors of {self.u.dim()} and {self.v.dim()} axes")
        if self.u.shape[1] != self.v.shape[0]:
            raise ValueError(f"factors of ranks {self.u.shape[1]} and {self.v.shape[0]}")
        if self.u.shape[0] * self.v.shape[1] != math.prod(self.shape):
            raise ValueError(
                f"factors {tuple(self.u.shape)} and {tuple(self.v.shape)} do not make {self.shape}"
            )

    def dense(self) -> Tensor:
        """The product in the dense tensor's shape."""
        sizes = [self.shape[axis] for axis in self.axes]
        return (self.u @ self.v).reshape(sizes).permute(inverse(self.axes))


def inverse(axes: tuple[int, ...]) -> list[int]:
    """The permutation that undoes `axes`."""
    return sorted(range(len(axes)), key=axes.__getitem__)
