"""A tensor that is a matrix product and may stay one until it is added to a sum."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Product:
    """u @ v, read as a dense tensor of `shape`.

    u: (..., r), v: (r, ...). The axes of u without the last and of v without the first make the
    product's rows and columns. These are the dense tensor's axes in the order `axes`: FedHM unrolls
    a convolution (n, m, kh, kw) to (m * kh, n * kw), which is `axes` (1, 2, 0, 3). Raises
    ValueError where u, v and `shape` do not fit.
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
        """u (p, r) and v (r, q); copies where they do not lie so."""
        rank = self.v.shape[0]
        return self.u.reshape(-1, rank), self.v.reshape(rank, -1)

    def dense(self) -> Tensor:
        """The product in the dense tensor's shape."""
        u, v = self.matrices()
        sizes = [self.shape[axis] for axis in self.axes]
        return (u @ v).reshape(sizes).permute(inverse(self.axes))


def inverse(axes: tuple[int, ...]) -> list[int]:
    """The permutation that undoes `axes`."""
    return sorted(range(len(axes)), key=axes.__getitem__)
