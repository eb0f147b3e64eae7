"""A tensor stored as two matrices. They are multiplied only when the tensor is needed."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Product:
    """A dense tensor of `shape`, stored as two factors: their product u @ v with axes reordered.

    All axes of u except the last are the rows of the product, and all axes of v except the first
    are its columns. Together they are the axes of the dense tensor, in the order `axes`. For
    example, FedHM unrolls a convolution (n, m, kh, kw) to (m * kh, n * kw): `axes` is (1, 2, 0, 3).

    Attributes:
        u: Left factor (..., r).
        v: Right factor (r, ...).
        shape: Shape of the dense tensor.
        axes: For each axis of the product, the axis of the dense tensor.

    Raises:
        ValueError: If u, v and `shape` do not fit together.
    """

    u: Tensor
    v: Tensor
    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.u.shape[-1] != self.v.shape[0]:
            raise ValueError(f"factors of ranks {self.u.shape[-1]} and {self.v.shape[0]}")
        sizes = (*self.u.shape[:-1], *self.v.shape[1:])
        if sizes != tuple(self.shape[axis] for axis in self.axes):
            raise ValueError(f"factors that make {sizes}, not {self.shape}")

    def matrices(self) -> tuple[Tensor, Tensor]:
        """The factors as matrices: u (p, r) and v (r, q).

        They are copied only if their memory layout requires it.
        """
        rank = self.v.shape[0]
        return self.u.reshape(-1, rank), self.v.reshape(rank, -1)

    def dense(self) -> Tensor:
        """The product in the shape of the dense tensor."""
        # Multiply as two matrices, then bring the axes into the order of the dense tensor.
        u, v = self.matrices()
        sizes = [self.shape[axis] for axis in self.axes]
        return (u @ v).reshape(sizes).permute(inverse(self.axes))


def inverse(axes: tuple[int, ...]) -> list[int]:
    """The inverse of the permutation `axes`."""
    return sorted(range(len(axes)), key=axes.__getitem__)
