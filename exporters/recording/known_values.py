"""While a model is recorded, reads the values of tensors that do not depend on samples.

A model may store a list of columns or a flag as a tensor, in an attribute or in a buffer of
integers. Its Python code may branch on the values. `torch.export` does not know these values. This
module computes them in parallel with the recording.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from exporters.programs import source_lines

LARGEST = 10_000
"""Values of tensors with more elements are not followed."""
READING = ("__bool__", "__int__", "__index__", "__float__", "item", "tolist")
"""Functions that turn a tensor into Python's numbers."""
FOLLOWED = (
    *("__getitem__", "__iter__", "select", "unbind", "view", "reshape", "flatten", "squeeze"),
    *("unsqueeze", "cpu", "clone", "detach", "to", "int", "long", "float", "bool", "type_as"),
    *("sum", "any", "all", "max", "min", "amax", "amin", "argmax", "argmin", "prod", "mean"),
    *("cumsum", "diff", "floor", "ceil", "round", "abs", "neg", "sqrt", "exp", "log", "pow"),
    *("remainder", "minimum", "maximum", "logical_not", "__invert__", "__neg__", "__abs__"),
    *(name for word in ("eq", "ne", "gt", "lt", "ge", "le") for name in (word, f"__{word}__")),
    *(
        name
        for word in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")
        for name in (word, f"__{word}__", f"__r{word}__")
    ),
)
"""Functions whose results are known if the values of their tensors are known."""
SIZED = ("unique", "unique_consecutive", "nonzero", "bincount")
"""Functions whose results have sizes that depend on values: of known values, they are constants."""
MADE = ("tensor", "as_tensor", "arange", "linspace", "zeros", "ones", "full")
"""Functions that make a tensor of numbers, if the numbers are not tensors."""


class KnownValues(TorchFunctionMode):
    """Context in which a model's Python code may read the values of the model's constants.

    Attributes:
        number: The user's last line that read a number from another tensor, for example by `int`.
            Empty if there was no such line.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.number = ""
        self._following = True
        self._module = module
        # Batch norms write their counters. Models that write other buffers are refused.
        self._buffers = {
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if not buffer.is_floating_point() and not name.endswith("num_batches_tracked")
        }
        # The recorded tensors, which must live as long as their ids are used, and their values.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        # The memory of the module's own tensors. What is written elsewhere is known, too.
        self._own = {memory(buffer) for buffer in self._buffers.values()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`; if it reads a known value, return that value."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in READING:
            value = self._value(args[0])
            if value is not None:
                return computed(func, (value,), {})
            if name != "__bool__":
                self.number = source_lines.running_line()
        if name in SIZED:
            fixed = self._fixed_size(func, args, kwargs)
            if fixed is not None:
                return fixed
        written = self._value(args[0]) if writes(name) else None
        result = func(*args, **kwargs)
        if written is None and name not in (*FOLLOWED, *MADE):
            return result
        leaves, form = tree_flatten((args, kwargs))
        if name == "type_as":  # only the type of the other tensor matters
            leaves[1] = torch.zeros((), dtype=leaves[1].dtype)
        values = [self._value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        unknown = any(
            value is None and isinstance(leaf, Tensor)
            for value, leaf in zip(values, leaves, strict=True)
        )
        unknown = unknown or not all(isinstance(leaf, Tensor) or is_fixed(leaf) for leaf in leaves)
        if written is not None:
            if unknown or memory(written) in self._own:
                self._forget(args[0])
            else:
                computed(func, *tree_unflatten(values, form))
            return result
        if unknown or (name in MADE and result.numel() > LARGEST):
            return result
        return self._noted(result, computed(func, *tree_unflatten(values, form)))

    def _fixed_size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `func` as constants; None unless the values of all arguments are known."""
        leaves, form = tree_flatten((args, kwargs))
        values = [self._value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(v is None for v, leaf in zip(values, leaves, strict=True) if leaf is not None):
            return None
        found = computed(func, *tree_unflatten(values, form))
        made = tree_map(lambda v: torch.tensor(v.tolist(), dtype=v.dtype), found)
        return self._noted(made, found)

    def _value(self, tensor: Any) -> Tensor | None:
        """The values of `tensor`, if they are known."""
        if not self._following:
            return None
        if type(tensor) is Tensor:  # recorded tensors are of other types
            with suppress(RuntimeError):  # a tensor inside `vmap` has no memory of its own
                self._own.add(memory(tensor))
            return tensor if tensor.numel() <= LARGEST else None
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        for name in self._buffers:
            if self._module.get_buffer(name) is tensor:
                return self._buffers[name]
        return None

    def _forget(self, written: Tensor) -> None:
        """Forget the values of a written buffer, and all values that were read from buffers before.

        If another tensor is written, follow nothing more: it may share memory with any constant.
        """
        names = [name for name in self._buffers if self._module.get_buffer(name) is written]
        self._following = bool(names)
        self._known.clear()
        for name in names:
            del self._buffers[name]

    def _noted(self, result: Any, values: Any) -> Any:
        """Note that the recorded `result` has these `values`, and return it."""
        if isinstance(result, Iterator):
            result, values = list(result), list(values)
            return iter(self._noted(result, values))
        several = isinstance(result, Sequence)
        for part, value in zip(result, values, strict=True) if several else [(result, values)]:
            if isinstance(part, Tensor):
                self._known[id(part)] = part, value
        return result


def is_fixed(value: object) -> bool:
    """Whether an argument is equal for all batches: not a size, not a pair of a complex number."""
    if isinstance(value, slice):
        return all(map(is_fixed, (value.start, value.stop, value.step)))
    return value is None or isinstance(value, FIXED)


FIXED = (
    int,
    float,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    EllipsisType,
)


def memory(value: Tensor) -> int:
    """The place of the numbers of `value` in memory. Views of a tensor have the same place."""
    return value.untyped_storage().data_ptr()


def writes(name: str) -> bool:
    """Whether the function `name` changes a tensor in place."""
    return name == "__setitem__" or bool(
        re.fullmatch(r"[a-z]\w*[a-z0-9]_|__i(?!ter|nvert)\w+__", name)
    )


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func` outside of the recording."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return func(*args, **kwargs)
