"""Shape operators, expressed by simpler operators that writers support."""

import torch
from torch import Tensor

from exporters.decompositions.decomposition import Decompositions

aten = torch.ops.aten


def squeeze_dims(x: Tensor, dims: list[int]) -> Tensor:
    """Remove the axes in `dims` that have size one."""
    axes = {dim % x.dim() for dim in dims}
    return x.reshape([n for axis, n in enumerate(x.shape) if axis not in axes or n != 1])


def empty_permuted(
    size: list[int], physical_layout: list[int], dtype: torch.dtype | None = None, **options: object
) -> Tensor:
    """Return zeros, because graphs have no uninitialised memory."""
    return aten.full.default(size, 0.0, dtype=dtype)  # type: ignore[no-any-return]


def diagonal_backward(
    grad: Tensor, input_sizes: list[int], offset: int, dim1: int, dim2: int
) -> Tensor:
    """A tensor of zeros with `grad` (.., length) on the diagonal column - row = offset."""
    axes = [dim % len(input_sizes) for dim in (dim1, dim2)]
    rows, columns = (input_sizes[axis] for axis in axes)
    above = max(-offset, 0)
    # Spread the gradient over whole rows, then keep it on the diagonal only.
    by_row = aten.constant_pad_nd(grad, [above, rows - above - grad.shape[-1]]).unsqueeze(-1)
    on_it = torch.arange(columns) - torch.arange(rows).unsqueeze(1) == offset
    return torch.where(on_it, by_row, 0.0).movedim((-2, -1), axes)


def diagonal_scatter(
    x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """`x` with `src` (.., length) on the diagonal column - row = offset."""
    axes = [dim % x.dim() for dim in (dim1, dim2)]
    sizes = [n if axis in axes else 1 for axis, n in enumerate(x.shape)]
    ones = torch.ones([*[1] * (x.dim() - 2), src.shape[-1]])
    on_it = diagonal_backward(ones, sizes, offset, *axes)
    return torch.where(on_it > 0, diagonal_backward(src, list(x.shape), offset, *axes), x)


def select_backward(grad: Tensor, input_sizes: list[int], dim: int, index: int) -> Tensor:
    """A tensor of zeros with `grad` at `index` of the axis `dim`."""
    size, axis = input_sizes[dim], dim % len(input_sizes)
    if not isinstance(size, int):  # the batch
        positions = torch.arange(size).reshape([-1, *[1] * (len(input_sizes) - 1 - axis)])
        chosen = index if index >= 0 else size + index
        return torch.where(positions == chosen, grad.unsqueeze(axis), 0.0)
    position = index % size
    pads = [0, 0] * (len(input_sizes) - 1 - axis)
    # PyTorch's decomposition instead selects from zeros and the gradient by a mask of this size.
    return aten.constant_pad_nd(grad.unsqueeze(axis), [*pads, position, size - 1 - position])  # type: ignore[no-any-return]


def unfold_backward(grad: Tensor, input_sizes: list[int], dim: int, size: int, step: int) -> Tensor:
    """dX[i] = sum of grad[o, j] over all windows o and positions j with o * step + j = i."""
    dim %= len(input_sizes)
    windows = grad.movedim((dim, -1), (0, 1))
    positions = torch.arange(windows.shape[0]).unsqueeze(1) * step + torch.arange(size)
    rest = [n for axis, n in enumerate(input_sizes) if axis != dim]
    zeros = grad.new_zeros([input_sizes[dim], *rest])
    return zeros.index_put((positions,), windows, accumulate=True).movedim(0, dim)


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Compute the sum or the mean of all elements that are written to the same place."""
    if reduce not in ("sum", "mean"):
        return NotImplemented  # type: ignore[no-any-return]
    count = torch.zeros_like(x).scatter_add(dim, index, torch.ones_like(src))
    # A place that nothing is written to keeps its value.
    start = x if include_self else torch.where(count == 0, x, 0)
    total = start.scatter_add(dim, index, src)
    if reduce == "sum":
        return total
    return total / (count + 1 if include_self else count.clamp(min=1))


def masked_write(
    x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Write one value at all positions of `x` at which a mask over the first axes is true.

    Returns NotImplemented for other indices.
    """
    mask = indices[0]
    if len(indices) > 1 or mask is None or mask.dtype != torch.bool or accumulate:
        return NotImplemented  # type: ignore[no-any-return]
    if values.numel() != 1:
        return NotImplemented  # type: ignore[no-any-return]
    whole = mask.reshape([*mask.shape, *[1] * (x.dim() - mask.dim())])
    return torch.where(whole, values.reshape([]), x)


DECOMPOSITIONS: Decompositions = {
    aten.index_put.default: masked_write,
    aten.scatter_reduce.two: scatter_reduce,
    aten.diagonal_backward.default: diagonal_backward,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.select_backward.default: select_backward,
    aten.unfold_backward.default: unfold_backward,
    aten.squeeze.dims: squeeze_dims,
    aten.empty_permuted.default: empty_permuted,
}
