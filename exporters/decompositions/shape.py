"""Shape operators that writers know only in a simpler form."""

import torch
from torch import Tensor

from exporters.decompositions.form import Forms

aten = torch.ops.aten


def squeeze_dims(x: Tensor, dims: list[int]) -> Tensor:
    """Drop the axes `dims` that have size one."""
    places = {dim % x.dim() for dim in dims}
    return x.reshape([n for axis, n in enumerate(x.shape) if axis not in places or n != 1])


FORMS: Forms = {aten.squeeze.dims: squeeze_dims}
