"""Arrays that a model makes by NumPy in the size of the batch, made by torch instead.

An array of NumPy has a fixed size. An example is `np.tile(np.arange(n), [x.shape[0], 1])`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import SymInt, Tensor

from exporters.programs.torch_internals import replaced
from exporters.recording.replacements.python_code.python_functions import OfType
from exporters.recurrence.replacements import LOCK


def depends(value: Any) -> bool:
    """Whether a number in `value` depends on the batch."""
    several = isinstance(value, tuple | list)
    return any(map(depends, value)) if several else isinstance(value, SymInt)


def sizes(shape: Any) -> list[Any]:
    """The sizes in the argument `shape`."""
    return list(shape) if isinstance(shape, tuple | list) else [shape]


def type_of(dtype: Any) -> torch.dtype:
    """The type of torch for a type of NumPy."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def tile(A: Any, reps: Any) -> Tensor:  # noqa: N803 - the name of NumPy's argument
    """`np.tile(A, reps)`."""
    once = torch.from_numpy(np.asarray(A))
    return once.repeat([*[1] * (once.dim() - len(sizes(reps))), *sizes(reps)])


def repeat(a: Any, repeats: Any, axis: int | None = None) -> Tensor:
    """`np.repeat(a, repeats, axis)`."""
    once = torch.from_numpy(np.asarray(a))
    once, axis = (once.flatten(), 0) if axis is None else (once, axis % once.dim())
    copies: list[Any] = [-1] * (once.dim() + 1)
    copies[axis + 1] = repeats
    return once.unsqueeze(axis + 1).expand(copies).flatten(axis, axis + 1)


def zeros(shape: Any, dtype: Any = float) -> Tensor:
    """`np.zeros(shape, dtype)`."""
    return torch.zeros(sizes(shape), dtype=type_of(dtype))


def ones(shape: Any, dtype: Any = float) -> Tensor:
    """`np.ones(shape, dtype)`."""
    return torch.ones(sizes(shape), dtype=type_of(dtype))


def full(shape: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    """`np.full(shape, fill_value, dtype)`."""
    kind = type_of(np.asarray(fill_value).dtype if dtype is None else dtype)
    return torch.full(sizes(shape), fill_value, dtype=kind)


def arange(*bounds: Any, dtype: Any = int) -> Tensor:
    """`np.arange(*bounds, dtype=dtype)`."""
    return torch.arange(*bounds, dtype=type_of(dtype))


ARRAYS: dict[str, Callable[..., Tensor]] = {
    "tile": tile,
    "repeat": repeat,
    "zeros": zeros,
    "ones": ones,
    "full": full,
    "arange": arange,
}
"""Functions of NumPy that take sizes, as functions of torch."""
CONSTRUCTORS = {
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
}
"""Functions of torch that make a tensor of an array, and its type."""


def for_batches(own: Callable[..., Any], form: Callable[..., Tensor]) -> Callable[..., Any]:
    """`form` for calls with a size that depends on the batch, and the function `own` for others."""
    thread = get_ident()

    def make(*given: Any, **named: Any) -> Any:
        own_thread = get_ident() == thread
        chosen = own_thread and any(map(depends, (*given, *named.values())))
        return form(*given, **named) if chosen else own(*given, **named)

    return make


def of_tensors(own: Any, dtype: torch.dtype) -> type:
    """The type `own`, such as `torch.LongTensor`, which converts a tensor, too."""

    class Made(metaclass=OfType):
        def __new__(cls, *given: Any) -> Any:
            made = len(given) == 1 and isinstance(given[0], Tensor)
            return given[0].to(dtype) if made else cls.own(*given)

    Made.own = own
    return Made


def from_numpy(array: Any) -> Tensor:
    """`torch.from_numpy(array)`; a tensor stays the same."""
    return array if isinstance(array, Tensor) else FROM_NUMPY(array)


FROM_NUMPY = torch.from_numpy


@contextmanager
def numpy_arrays() -> Iterator[None]:
    """Context in which torch makes the arrays that a model makes by NumPy for each sample."""
    changes: list[tuple[Any, str, Any]] = [
        (np, name, for_batches(getattr(np, name), form)) for name, form in ARRAYS.items()
    ]
    changes += [(torch, n, of_tensors(getattr(torch, n), t)) for n, t in CONSTRUCTORS.items()]
    with LOCK, replaced([*changes, (torch, "from_numpy", from_numpy)]):
        yield
