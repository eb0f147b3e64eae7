"""A context in which complex tensors are pairs of real tensors."""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exporters.recording.replacements.complex_numbers.complex_pairs import (
    Pair,
    as_pairs,
    compute,
    knows,
)
from exporters.recurrence.replacements import NUMPYS, Replacements

RECORDER = ("torch._", "torch.export.", "torch.fx.", "torch.utils.")
"""Beginnings of the names of torch's own modules, which take part in a recording."""


class ComplexPairs(Replacements):
    """Context that also computes functions of complex numbers, tensors and types with pairs.

    Complex tensors that the model keeps are constants: a recording folds their parts.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the replacement of `func`, compute it with pairs, or call `func` itself."""
        kwargs = kwargs or {}
        given = args, kwargs
        name = getattr(func, "__name__", str(func))
        values = (*args, *kwargs.values(), *[torch.cfloat] * (name in ("cfloat", "cdouble")))
        if not any(map(is_complex, flat(values))) or in_recorder():
            return super().__torch_function__(func, types, args, kwargs)
        args, kwargs = as_pairs(args), {key: as_pairs(own) for key, own in kwargs.items()}
        replacement = self.replacements.get(func)
        if knows(name):
            call = func if replacement is None else partial(replacement, func)
            return compute(name, call, args, {NUMPYS.get(key, key): v for key, v in kwargs.items()})
        if replacement is not None:
            return super().__torch_function__(func, types, args, kwargs)
        return as_pairs(func(*given[0], **given[1]))


def in_recorder() -> bool:
    """Whether torch's recorder calls a function itself, for example to copy a constant."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back  # another context passes the call on
    caller = str(frame.f_globals.get("__name__"))
    return caller.startswith(RECORDER) and caller != "torch._tensor"


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield `values`, including those inside tuples and lists."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from flat(value[:])  # of a BatchList, the tensors that it repeats
        else:
            yield value


def is_complex(value: Any) -> bool:
    """Whether `value` is a complex number, tensor or type."""
    if isinstance(value, torch.dtype | Tensor):
        return value.is_complex if isinstance(value, torch.dtype) else value.dtype.is_complex
    return isinstance(value, complex | Pair)
