"""Attributes and special methods of tensors, such as `x.data` and `len(x)`: recorded or refused."""

import math
from typing import Any, NoReturn

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor

from exporters.programs.source_lines import called_place
from exporters.recurrence.replacements import Replacement
from profiles.errors import ModelError


def length(func: Any, x: Tensor) -> int:
    """`len` of a tensor. Raises ModelError for samples, because `len` would fix their number."""
    if x.dim() == 0 or not isinstance(x.shape[0], SymInt):
        return int(func(x))
    raise ModelError(
        "len() of a batch{place} gives a fixed number, but one recording must serve all batch "
        "sizes. Write x.shape[0] or x.size(0) instead of len(x).",
        code="model.fixed-batch",
        place=called_place(),
    )


def getitem(func: Any, x: Tensor, index: Any) -> Any:
    """`x[index]`. Raises ModelError if the index is a name, as in a dictionary of inputs."""
    if not isinstance(index, str):
        return func(x, index)
    raise ModelError(
        "The model reads the input {name!r} from a dictionary{place}. Give the shape of each "
        "input: --input NAME:SHAPE, or --input NAME:SHAPE:int64 for ids, in place of "
        "--input-shape. In Python, use `pack_inputs`; in a federation's file, use the key "
        "`inputs`.",
        code="model.inputs",
        name=index,
        place=called_place(),
    )


def unbind(func: Any, input: Tensor, dim: int = 0) -> Any:
    """`torch.unbind`, as `for row in x` calls it. Raises ModelError for the rows of a batch."""
    if input.dim() == 0 or not isinstance(input.shape[dim], SymInt):
        return func(input, dim)
    raise ModelError(
        "The model loops over the samples of a batch{place}, and one recording must serve all "
        "batch sizes. Compute all samples at once: operators have a batch axis. If forward takes "
        "one tuple of several inputs, give forward an argument for each input, and give the shapes "
        "with --input.",
        code="model.fixed-batch",
        place=called_place(),
    )


def numpy_array(*_: Any, **__: Any) -> NoReturn:
    """`Tensor.numpy`. Always raises ModelError, because a recording does not follow NumPy."""
    raise ModelError(
        "The model turns a tensor into a NumPy array{place}, and a recording does not follow "
        "NumPy. Compute with torch. Sizes, such as periods of a series, must not depend on values: "
        "choose them in __init__.",
        code="model.data-dependent-code",
        place=called_place(),
    )


def formatted(func: Any, x: Tensor, spec: str) -> str:
    """`format` of a tensor, as in `f"{x:.2f}"`. A recording has no values: it writes nan."""
    if not isinstance(x, FakeTensor) or not spec or x.dim():
        return str(func(x, spec))
    return format(math.nan, spec.replace("d", "f"))


def data_of(_: Any, x: Tensor) -> Tensor:
    """`x.data`: its value without a gradient. torch cannot record the attribute."""
    return x.detach()


def set_data(_: Any, x: Tensor, value: Tensor) -> None:
    """`x.data = value`: a write into `x`, without a gradient.

    Raises ModelError for results of operators and for values of another shape.
    """
    if (x.is_leaf or not x.requires_grad) and x.shape == value.shape:
        x.detach().copy_(value.detach())
        return
    raise ModelError(
        "The model assigns to `data`{place}, either values of another shape or to the `data` of a "
        "computed result. Compute with the new value instead, as in F.linear(x, weight[:8]).",
        code="model.writes-own-tensor",
        place=called_place(),
    )


TENSOR_METHODS: dict[Any, Replacement] = {
    Tensor.data.__get__: data_of,  # type: ignore[attr-defined]
    Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
    Tensor.__len__: length,
    Tensor.__getitem__: getitem,
    torch.unbind: unbind,
    Tensor.unbind: unbind,
    Tensor.__format__: formatted,
    Tensor.numpy: numpy_array,
    Tensor.__array__: numpy_array,
}
"""Maps a function of torch to the function that is recorded in its place."""
