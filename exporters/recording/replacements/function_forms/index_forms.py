"""Functions of torch that choose, count or write elements, as operators that both formats have."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._export import non_strict_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from exporters.programs import source_lines
from exporters.programs.torch_internals import replaced
from exporters.recording.replacements.python_code.python_functions import BatchRange
from exporters.recurrence.replacements import Replacement
from profiles.errors import ModelError

HANDLER: Any = getattr(non_strict_utils, "_NonStrictTorchFunctionHandler", SimpleNamespace())
OVERRIDE: Any = getattr(HANDLER, "_override", None)
Computes = Callable[..., Tensor]
CutLine = tuple[str, bool]
"""A line of the user that cuts sequences, and whether it cuts the first steps instead of the
last."""
CUT_LINES: ContextVar[list[CutLine] | None] = ContextVar("lines with cuts", default=None)
"""Collects the lines that cut at one end by a value, if the recording keeps all steps."""


def topk(
    func: Any,
    input: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    **more: Any,
) -> Any:
    """`torch.topk` in sorted order. Without sorting, each runtime would choose its own order."""
    return func(input, k, dim, largest, True, **more)


def sort(_: Any, input: Tensor, *given: Any, **more: Any) -> Any:
    """`torch.sort` that keeps the order of equal elements, as both runtimes do."""
    options = dict(zip(("dim", "descending"), given, strict=False)) | more
    options["stable"] = True
    return torch.sort(input, **{"dim": -1, **options})


def argsort(_: Any, input: Tensor, *given: Any, **more: Any) -> Tensor:
    """`torch.argsort`, like `sort`."""
    places: Tensor = sort(None, input, *given, **more)[1]
    return places


def split(func: Any, x: Tensor, size: Any, dim: int = 0) -> Any:
    """`torch.split` of samples into a fixed number of parts of equal size."""
    whole = x.shape[dim]
    if not isinstance(size, SymInt) or not isinstance(whole, SymInt):
        return func(x, size, dim)
    parts = whole.node.expr / size.node.expr
    if not parts.is_Integer:
        return func(x, size, dim)
    # The gradient of `unbind` joins the parts; the gradient of a slice writes into zeros.
    return x.unflatten(dim, (int(parts), size)).unbind(dim)


def chunk(func: Any, input: Tensor, chunks: int, dim: int = 0) -> Any:
    """`torch.chunk` of rows of samples, for example of two views of each sample."""
    whole = input.shape[dim]
    if not isinstance(whole, SymInt) or int(whole.node.expr.as_coeff_Mul()[0]) % chunks:
        return func(input, chunks, dim)
    return split(func, input, whole // chunks, dim)


def bincount(func: Computes, input: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
    """`torch.bincount` of whole numbers below `minlength`, so that the size is fixed."""
    if minlength == 0 or weights is not None:
        return func(input, weights, minlength)
    places = input.to(torch.int64)
    return torch.zeros(minlength, dtype=torch.int64).scatter_add(0, places, torch.ones_like(places))


def eye(_: Any, n: Any, m: Any = None, *, dtype: Any = None, **__: Any) -> Tensor:
    """`torch.eye`. Torch would use a type of integers that TFLite does not have."""
    rows, columns = torch.arange(n), torch.arange(n if m is None else m)
    return (rows[:, None] == columns).to(dtype or torch.get_default_dtype())


def constant(func: Computes, *given: Any, **more: Any) -> Tensor:
    """Compute `func` of numbers now, and store the result as a constant of the recording."""
    if any(isinstance(value, Tensor | SymInt) for value in (*given, *more.values())):
        return func(*given, **more)
    with _disable_current_modes():
        values = func(*given, **more).numpy()
    return torch.tensor(values)


def searchsorted(
    func: Computes,
    sorted_sequence: Tensor,
    input: Any,
    *given: Any,
    right: bool = False,
    **more: Any,
) -> Tensor:
    """`torch.searchsorted`: for each number of `input`, how many of `sorted_sequence` are below."""
    if given or not isinstance(input, Tensor) or any(more.values()):
        return func(sorted_sequence, input, *given, right=right, **more)
    rows = sorted_sequence if sorted_sequence.dim() == 1 else sorted_sequence.unsqueeze(-2)
    compare = torch.le if right else torch.lt
    return compare(rows, input.unsqueeze(-1)).sum(-1)


def indexed(func: Any, x: Tensor, index: Any) -> Any:
    """`x[index]`. An index that is a tensor with a single integer stays a tensor.

    `torch.export` would read the integer, which is not known while a model is recorded.
    """
    axes = index if isinstance(index, tuple) else (index,)
    if not any(is_integer(part) for part in axes) or not all(map(is_plain, axes)):
        return func(x, index)
    axis = 0
    for part in axes:
        if is_integer(part):
            place = torch.where(part < 0, part + x.shape[axis], part)
            x = x.index_select(axis, place.view(1)).squeeze(axis)
        else:
            x = func(x, (*[slice(None)] * axis, part))
            axis += not isinstance(part, int)
    return x


def overridden(handler: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The function that `torch.export` calls for `func`: `indexed` if the index is a tensor."""
    if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
        axes = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(part, BatchRange) for part in axes):
            axes = tuple(p.tensor() if isinstance(p, BatchRange) else p for p in axes)
            args = args[0], axes
        lines = CUT_LINES.get()
        if lines is not None and any(map(cuts_one_end, axes)):
            ahead = any(cuts_one_end(part) and part.start is not None for part in axes)
            lines.append((source_lines.running_line(), ahead))
            axes = tuple(slice(None) if cuts_one_end(part) else part for part in axes)
            args = args[0], axes
        if any(isinstance(part, slice) and is_cut_by_value(part) for part in axes):
            raise cut_by_value(source_lines.running_line())
        if any(map(is_integer, axes)) and all(map(is_plain, axes)):
            return indexed, (func, *args), {}
    return OVERRIDE(handler, func, args, kwargs)  # type: ignore[no-any-return]


def cuts_one_end(part: Any) -> bool:
    """Whether `part` of an index is a slice that leaves out steps at one end up to a value."""
    if not isinstance(part, slice) or not is_cut_by_value(part):
        return False
    return part.step is None and (part.start is None or part.stop is None)


def cut_by_value(line: str) -> ModelError:
    """The error for a model that cuts a tensor, at `line`, at a place that depends on values."""
    return ModelError(
        "The model cuts a tensor at a place that depends on values{place}; only the batch size may "
        "vary. Keep all elements, and mask those that do not count. For example, torch.arange(n) < "
        "lengths.unsqueeze(1) is a mask for sequences of n steps whose first `lengths` steps "
        "count.",
        code="model.data-dependent-size",
        place=source_lines.parenthesized(line),
    )


def integers_stay_tensors() -> AbstractContextManager[None]:
    """Let `torch.export` record `x[i]` without reading the integer from the tensor `i`."""
    return replaced([(HANDLER, "_override", overridden)])


def is_cut_by_value(part: slice) -> bool:
    """Whether a bound of a slice is a recorded tensor."""
    return any(isinstance(bound, FakeTensor) for bound in (part.start, part.stop, part.step))


def is_integer(part: Any) -> bool:
    """Whether an index is a tensor with a single integer and without axes."""
    integer = isinstance(part, Tensor) and part.dtype in (torch.int32, torch.int64)
    return integer and part.dim() == 0


def is_plain(part: Any) -> bool:
    """Whether an index is an integer or an integer tensor, a slice, or None for a new axis."""
    return part is None or isinstance(part, slice) or type(part) is int or is_integer(part)


def setitem(func: Any, x: Any, index: Any, value: Any) -> None:
    """`x[index] = value` for a mask or a list of integers, by operators that TFLite has."""
    if is_mask(index) and is_number(value):
        mask = index.reshape(*index.shape, *[1] * (x.dim() - index.dim()))
        x.copy_(torch.where(mask, value, x))
        return
    axes = index if isinstance(index, tuple) else (index,)
    if is_number(value) and is_cut_by_values(axes):
        x.copy_(torch.where(mask_of_slices(x, axes), value, x))
        return
    chosen = [axis for axis, part in enumerate(axes) if not is_whole(part)]
    if len(chosen) != 1 or len(axes) > x.dim():
        func(x, index, value)
        return
    (axis,) = chosen
    if is_mask(axes[axis]) and axes[axis].dim() == 1 and is_number(value):
        mask = axes[axis].view(-1, *[1] * (x.dim() - axis - 1))
        x.copy_(torch.where(mask, value, x))
        return
    if not is_list(axes[axis]):
        func(x, index, value)
        return
    size = x.shape[axis]
    numbers = torch.as_tensor(axes[axis])
    numbers = torch.where(numbers < 0, numbers + size, numbers)
    shape = [*x.shape[:axis], numbers.shape[0], *x.shape[axis + 1 :]]
    places = numbers.view(-1, *[1] * (x.dim() - axis - 1)).expand(shape)
    x.copy_(x.scatter(axis, places, torch.as_tensor(value).to(x.dtype).expand(shape)))


def is_cut_by_values(axes: tuple[Any, ...]) -> bool:
    """Whether an index has slices alone, and some of them have a recorded tensor as a bound."""
    slices = all(isinstance(part, slice) and part.step in (None, 1) for part in axes)
    return slices and any(map(is_cut_by_value, axes))


def mask_of_slices(x: Tensor, axes: tuple[slice, ...]) -> Tensor:
    """Where `x` lies in all of these slices, for broadcasting to `x`."""
    mask = torch.ones([1] * x.dim(), dtype=torch.bool)
    for axis, part in enumerate(axes):
        size, bounds = x.shape[axis], [part.start, part.stop]
        for n, bound in enumerate(bounds):
            if isinstance(bound, Tensor):
                bounds[n] = torch.where(bound < 0, bound + size, bound)
            elif bound is not None and bound < 0:
                bounds[n] = bound + size
        places = torch.arange(size).view(-1, *[1] * (x.dim() - axis - 1))
        mask = mask if bounds[0] is None else mask & (places >= bounds[0])
        mask = mask if bounds[1] is None else mask & (places < bounds[1])
    return mask


def is_mask(part: Any) -> bool:
    """Whether an index is a tensor of booleans."""
    return isinstance(part, Tensor) and part.dtype == torch.bool


def is_number(value: Any) -> bool:
    """Whether `value` is a number, also as a tensor without axes."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def is_whole(part: Any) -> bool:
    """Whether an index takes a whole axis."""
    return isinstance(part, slice) and part == slice(None)


def is_list(part: Any) -> bool:
    """Whether an index is a list of integers."""
    if isinstance(part, Tensor):
        return part.dim() == 1 and part.dtype in (torch.int32, torch.int64)
    return isinstance(part, list) and bool(part) and all(type(n) is int for n in part)


def index_fill(func: Computes, input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`torch.index_fill`."""
    if not isinstance(input.shape[dim], int):
        return func(input, dim, index, value)
    hit = (torch.arange(input.shape[dim])[:, None] == index % input.shape[dim]).any(1)
    behind = input.dim() - 1 - dim % input.dim()
    return torch.where(hit.view(-1, *[1] * behind), value, input)


def fill_diagonal(func: Computes, x: Tensor, fill_value: Any, *given: Any, **more: Any) -> Tensor:
    """`Tensor.fill_diagonal_` of a matrix, whose sides may be the number of samples."""
    if x.dim() != 2 or given or more:
        return func(x, fill_value, *given, **more)
    return x.copy_(torch.where(eye(None, *x.shape, dtype=torch.bool), fill_value, x))


def index_copy(_: Any, input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """`torch.index_copy`."""
    behind = input.dim() - 1 - dim % input.dim()
    return input.scatter(dim, index.view(-1, *[1] * behind).expand(source.shape), source)


def take_along_dim(func: Computes, input: Tensor, indices: Tensor, dim: Any = None) -> Tensor:
    """`torch.take_along_dim` along an axis."""
    if dim is None or input.dim() != indices.dim():
        return func(input, indices, dim)
    dim %= input.dim()
    pairs = list(zip(input.shape, indices.shape, strict=True))
    # Compared as objects: comparing sizes would fix the batch.
    sizes = [a if type(b) is int and b == 1 else b for a, b in pairs]
    sizes[dim] = indices.shape[dim]
    whole = [b if type(a) is int and a == 1 else a for a, b in pairs]
    whole[dim] = input.shape[dim]
    return input.expand(whole).gather(dim, indices.expand(sizes))


def roll(func: Computes, input: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    """`torch.roll` along axes. A shift may be a tensor with a single integer."""
    both = [list(given) if isinstance(given, tuple | list) else [given] for given in (shifts, dims)]
    if dims is None or not any(map(is_integer, both[0])):
        return func(input, shifts, dims)
    for shift, axis in zip(*both, strict=True):
        size = input.shape[axis]
        input = input.index_select(axis, (torch.arange(size) - shift) % size)
    return input


INDEXING: dict[Any, Replacement] = {
    torch.sort: sort,
    Tensor.sort: sort,
    torch.argsort: argsort,
    Tensor.argsort: argsort,
    torch.topk: topk,
    Tensor.topk: topk,
    torch.split: split,
    Tensor.split: split,
    torch.chunk: chunk,
    Tensor.chunk: chunk,
    torch.eye: eye,
    torch.tril_indices: constant,
    torch.triu_indices: constant,
    torch.logspace: constant,
    torch.hamming_window: constant,
    torch.blackman_window: constant,
    torch.bartlett_window: constant,
    torch.kaiser_window: constant,
    torch.searchsorted: searchsorted,
    Tensor.__setitem__: setitem,
    torch.index_fill: index_fill,
    Tensor.index_fill: index_fill,
    Tensor.fill_diagonal_: fill_diagonal,
    torch.index_copy: index_copy,
    Tensor.index_copy: index_copy,
    torch.take_along_dim: take_along_dim,
    Tensor.take_along_dim: take_along_dim,
    torch.roll: roll,
    Tensor.roll: roll,
    torch.bincount: bincount,
    Tensor.bincount: bincount,
}
"""Maps a function of torch to the function that is recorded in its place."""
