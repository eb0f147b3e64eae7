"""Computes with all elements in place of those that a mask selects, and writes where the mask is.

`x[mask]` has a size that depends on values. But `x[mask] = y[mask] + 1` writes the same as
`torch.where(mask, y + 1, x)`, and the mean of `x[mask]` is a quotient of two sums.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

COMPARISONS = tuple(
    name for word in ("eq", "ne", "lt", "le", "gt", "ge") for name in (word, f"__{word}__")
)
"""Functions that make masks."""
PAIRS = tuple(
    name
    for word in ("add", "sub", "mul", "truediv", "pow")
    for name in (word, f"__{word}__", f"__r{word}__", f"__i{word}__", f"{word}_")
)
ELEMENTWISE = (
    *(*PAIRS, "div", "div_", "rsub", "neg", "__neg__", "abs", "exp", "log", "sqrt", "square"),
    *("sigmoid", "tanh", "relu", "sin", "cos", "clamp", "minimum", "maximum", "reciprocal"),
    *("float", "to", "detach", "clone"),
)
"""Functions of single elements, by name."""


class Selected(NamedTuple):
    """Elements that a mask selects.

    Attributes:
        values: The tensor (selected, ...), kept so that its id stays its own.
        whole: All elements; those that the mask leaves out are arbitrary, but finite.
        mask: The mask, in the shape of the first axes of `whole`.
        version: The version of `values`; a later write by another function changes the version.
    """

    values: Tensor
    whole: Tensor
    mask: Tensor
    version: int


class MaskedValues(TorchFunctionMode):
    """Context in which elements selected by a mask are also followed as whole tensors.

    Elements that are used in another way keep their own, unknown size.
    """

    def __init__(self) -> None:
        super().__init__()
        self._selected: dict[int, Selected] = {}
        self._compared: dict[int, tuple[Tensor, object]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, on whole tensors if it takes selected elements."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func is Tensor.__getitem__ and is_followed(*args):
            return self._select(func, *args)
        if func is Tensor.__setitem__ and self._of(args[2]) is not None and not kwargs:
            return self._write(func, *args)
        if name in ELEMENTWISE and any(self._of(argument) for argument in args):
            return self._computed(func, args, kwargs)
        if name in ("sum", "mean") and len(args) == 1 and not kwargs and self._of(args[0]):
            return self._reduced(name, self._selected[id(args[0])])
        result = func(*args, **kwargs)
        if name in COMPARISONS and isinstance(result, FakeTensor):
            key = name, tuple((id(a), a._version) if isinstance(a, Tensor) else a for a in args)
            self._compared[id(result)] = result, (key, args)
        return result

    def _of(self, value: Any) -> Selected | None:
        """What is known of `value`, if it has selected elements."""
        found = self._selected.get(id(value)) if isinstance(value, FakeTensor) else None
        return found if found and found.version == value._version else None

    def _noted(self, values: Tensor, whole: Tensor, mask: Tensor) -> Tensor:
        self._selected[id(values)] = Selected(values, whole, mask, values._version)
        return values

    def _select(self, func: Any, x: Tensor, mask: Tensor) -> Tensor:
        # A one is fine for logarithms, roots and quotients: their gradients stay finite.
        whole = torch.where(like(mask, x), x, torch.ones((), dtype=x.dtype))
        return self._noted(func(x, mask), whole, mask)

    def _write(self, func: Any, x: Tensor, mask: Any, values: Tensor) -> None:
        selected = self._selected[id(values)]
        same = isinstance(mask, Tensor) and self._same(mask, selected.mask)
        if same and x.shape[mask.dim() :] == selected.whole.shape[mask.dim() :]:
            x.copy_(torch.where(like(mask, x), selected.whole.to(x.dtype), x))
        else:
            func(x, mask, values)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = [selected for argument in args if (selected := self._of(argument))]
        more = [a for a in args if not self._of(a)] + [*kwargs.values()]
        others = [a for a in more if isinstance(a, Tensor) and a.dim()]
        wholes = [s.whole if (s := self._of(argument)) else argument for argument in args]
        values = func(*args, **kwargs)  # may write into `args`
        if others or not all(self._same(found[0].mask, other.mask) for other in found):
            self._selected.pop(id(values), None)
            return values
        if func.__name__.endswith("_") and wholes[0] is not args[0]:
            wholes[0] = wholes[0].clone()
        return self._noted(values, func(*wholes, **kwargs), found[0].mask)

    def _reduced(self, name: str, selected: Selected) -> Tensor:
        mask = like(selected.mask, selected.whole).expand_as(selected.whole)
        total = torch.where(mask, selected.whole, torch.zeros((), dtype=selected.whole.dtype)).sum()
        return total if name == "sum" else total / mask.sum()

    def _same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two masks are the same tensor, or the same comparison of the same tensors."""
        if one is other:
            return True
        keys = [self._compared.get(id(mask), (mask, (mask, ())))[1] for mask in (one, other)]
        return keys[0][0] == keys[1][0]  # type: ignore[index,no-any-return]


def is_followed(x: Any, index: Any) -> bool:
    """Whether `x[index]` selects elements of a recorded tensor by a mask."""
    mask = isinstance(index, FakeTensor) and index.dtype == torch.bool and bool(index.dim())
    return mask and isinstance(x, FakeTensor) and index.dim() <= x.dim()


def like(mask: Tensor, x: Tensor) -> Tensor:
    """`mask`, with further axes of size one so that it has as many as `x`."""
    return mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
