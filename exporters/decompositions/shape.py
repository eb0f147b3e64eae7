"""Shape operators that writers know only in a simpler form."""

import torch
from torch import Tensor

from exporters.decompositions.form import Forms

aten = torch.ops.aten


def squeeze_dims(x: Tensor, dims: list[int]) -> Tensor:
    """Drop the axes `dims` that have size one."""
    places = {dim % x.dim() for dim in dims}
    return x.reshape([n for axis, n in enumerate(x.shape) if axis not in places or n != 1])


def empty_permuted(
    size: list[int], physical_layout: list[int], dtype: torch.dtype | None = None, **options: object
) -> Tensor:
    """Memory that is filled before it is read: no graph has any that is not."""
    return aten.full.default(size, 0.0, dtype=dtype)  # type: ignore[no-any-return]


FORMS: Forms = {
    aten.squeeze.dims: squeeze_dims,
    aten.empty_permuted.default: empty_permuted,
}
