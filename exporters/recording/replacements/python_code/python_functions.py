"""Replaces Python's `len`, `range`, `int`, `float` and `round` in a model's code or a loss.

Python's functions return fixed numbers. The replacements let the length of a batch become a size
that depends on the batch. `int` and `float` of a recorded tensor return a tensor. A quotient of
sizes, as in `int(x.shape[0] / 4)`, stays a size.
"""

import ast
import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from exporters.programs.source_lines import running_line
from exporters.programs.torch_internals import replaced
from exporters.recurrence.replacements import LOCK

OTHERS = ("torch", "builtins")
"""Packages whose code never takes the length of a batch."""


def length(value: Any) -> Any:
    """`len(value)`. For a batch, it is a size that depends on the batch."""
    if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt):
        return value.shape[0]
    return builtins.len(value)


class OfType(type):
    """The type of classes that stand for a type of Python's numbers."""

    own: type

    def __instancecheck__(cls, value: object) -> bool:
        """Whether `value` is of the type that the class stands for."""
        return isinstance(value, cls.own)


class BatchRange:
    """A `range` to a size that depends on the batch. As an index, it becomes a tensor."""

    def __init__(self, *bounds: Any) -> None:
        self._bounds = bounds

    def __len__(self) -> int:
        """The fixed number of samples, which recording refuses."""
        return builtins.len(builtins.range(*self._bounds))

    def __iter__(self) -> Iterator[int]:
        """Iterate over a fixed number of samples."""
        return iter(builtins.range(*self._bounds))

    def __reversed__(self) -> Iterator[int]:
        """Iterate over a fixed number of samples."""
        return reversed(builtins.range(*self._bounds))

    def tensor(self) -> Tensor:
        """The numbers of the range."""
        return torch.arange(*self._bounds)


class Range(metaclass=OfType):
    """Stands for `range` in the code of a model."""

    own = range

    def __new__(cls, *bounds: Any) -> Any:
        """`range(*bounds)`; a BatchRange if a bound depends on the batch."""
        own = BatchRange if any(isinstance(n, SymInt) for n in bounds) else builtins.range
        return own(*bounds)


def rounded(value: Any, *digits: Any, **named: Any) -> Any:
    """`round(value, digits)`; a tensor for a recorded tensor."""
    if not isinstance(value, FakeTensor):
        return builtins.round(value, *digits, **named)
    places = [*digits, *named.values()]
    scale = 10.0 ** (places[0] if places and places[0] is not None else 0)
    return (value * scale).round() / scale


class Integer(metaclass=OfType):
    """Stands for `int` in the code of a model."""

    own = int

    def __new__(cls, *given: Any, **named: Any) -> Any:
        """`int(value)`; a tensor for a recorded tensor, and a size for a quotient of sizes."""
        value = given[0] if given else 0
        if isinstance(value, SymInt | SymFloat):
            return torch.sym_int(value)  # type: ignore[no-untyped-call]
        number = value.item() if isinstance(value, FakeTensor) else value
        if isinstance(number, Tensor):
            return number.to(torch.int64)
        return int(number, *given[1:], **named)


class Float(metaclass=OfType):
    """Stands for `float` in the code of a model."""

    own = float

    def __new__(cls, *given: Any) -> Any:
        """`float(value)`; a tensor for a recorded tensor."""
        value = given[0] if given else 0
        if isinstance(value, SymInt | SymFloat):
            return torch.sym_float(value)  # type: ignore[no-untyped-call]
        number = value.item() if isinstance(value, FakeTensor) else value
        return number.to(torch.float32) if isinstance(number, Tensor) else float(number)


def divide(size: SymInt, other: Any) -> Any:
    """`size / other`: a size if it is a whole number for every batch, a number if it is fixed."""
    if isinstance(other, SymInt) and (size.node.expr / other.node.expr).is_number:
        return float(size.node.expr / other.node.expr)
    whole = isinstance(other, int | float) and other and other == int(other)
    if whole and (size.node.expr / int(other)).as_coeff_Mul()[0].is_Integer:
        return size // int(other)
    return TRUE_DIVISION(size, other)  # type: ignore[no-untyped-call]


class BatchList(list[Tensor]):
    """A list of tensors, repeated by a size that depends on the batch, for `cat` and `stack`."""

    def __init__(self, values: list[Tensor], size: SymInt) -> None:
        super().__init__(values)
        self._size = size

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over a fixed number of tensors, which recording refuses."""
        return iter(list(super().__iter__()) * int(self._size))

    def joined(self, join: Any, dim: int) -> Tensor:
        """All tensors, joined by `join` along the axis `dim`."""
        once: Tensor = join(list(super().__iter__()), dim)
        sizes: list[Any] = [1] * once.dim()
        sizes[dim] = self._size
        if once.shape[dim] == 1:  # formats have a limit of axes, which `repeat` doubles
            return once.expand([-1 if size == 1 else size for size in sizes])
        return once.repeat(sizes)


def join(func: Any, tensors: Any, dim: int = 0) -> Tensor:
    """`torch.cat` and `torch.stack`, also of a BatchList."""
    known = isinstance(tensors, BatchList)
    found: Tensor = tensors.joined(func, dim) if known else func(tensors, dim)
    return found


def repeated(size: SymInt, other: Any) -> Any:
    """`other * size`: a list of numbers becomes a tensor with that many copies of them."""
    if isinstance(other, list) and other and all(isinstance(v, Tensor) for v in other):
        return BatchList(other, size)
    if not (isinstance(other, list) and other and all(type(n) in (int, float) for n in other)):
        return TIMES(size, other)
    numbers = torch.tensor(other)
    if "IntTensor(" in running_line():  # takes no other type
        numbers = numbers.to(torch.int32)
    return numbers.repeat(size)


TRUE_DIVISION, TIMES = SymInt.__truediv__, SymInt.__rmul__
FUNCTIONS = {
    "len": length,
    "range": Range,
    "round": rounded,
    "int": Integer,
    "float": Float,
}
"""The replacement of each function."""


def modules_of(model: nn.Module) -> list[ModuleType]:
    """The modules with the code of `model`, or of its own `function`, except those of torch."""
    code: set[Any] = {base for layer in model.modules() for base in type(layer).__mro__}
    # The user's own loss is not a class. A model may have an attribute of this name with any value.
    if isfunction(function := getattr(model, "function", None)):
        code.add(function)
    names = {own.__module__ for own in code if own.__module__.split(".")[0] not in OTHERS}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


@contextmanager
def python_functions(model: nn.Module) -> Iterator[None]:
    """Context in which the modules with the code of `model` use FUNCTIONS in place of Python's.

    Python's own functions are not replaced, because Python calls them far too often.
    """
    with LOCK:
        changed = [
            (vars(module), name)
            for module in modules_of(model)
            for name in FUNCTIONS
            if name not in vars(module) and only_calls(getattr(module, "__file__", None), name)
        ]
        for space, name in changed:
            space[name] = FUNCTIONS[name]
        try:
            with replaced([(SymInt, "__truediv__", divide), (SymInt, "__rmul__", repeated)]):
                yield
        finally:
            for space, name in changed:
                del space[name]


@cache
def only_calls(file: str | None, name: str) -> bool:
    """Whether the code in `file` uses the type `name` only to convert and to check values.

    It may also be a type of elements, as in `torch.zeros(3, dtype=int)`.
    """
    if not isinstance(FUNCTIONS[name], type):
        return True
    try:
        tree = ast.parse(Path(file or "").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    fine = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            is_check = isinstance(node.func, ast.Name) and node.func.id == "isinstance"
            fine |= {
                node.func,
                *(part for arg in node.args[1:] for part in ast.walk(arg) if is_check),
            }
        types = (getattr(node, "annotation", None), getattr(node, "returns", None))
        fine |= {part for kind in types if kind is not None for part in ast.walk(kind)}
    uses = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name)
    return all(node in fine for node in uses)
