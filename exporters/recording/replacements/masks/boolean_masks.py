"""Computes with all elements instead of those that a mask selects, and writes where it is true.

`x[mask]` has a size that depends on values. But `x[mask] = y[mask] + 1` writes the same as
`torch.where(mask, y + 1, x)`, and the mean of `x[mask]` is a quotient of two sums. Layers that work
on each row alone also take all rows. So an expert of a mixture runs on all samples.
`masked_index.py` finds the mask in an index.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from exporters.recording.replacements.masks.masked_index import (
    MaskedIndexes,
    Pairs,
    same_size,
    viewed,
)
from exporters.recording.replacements.masks.masks_by_size import MasksBySize

COMPARISONS = tuple(
    name for word in ("eq", "ne", "lt", "le", "gt", "ge") for name in (word, f"__{word}__")
)
"""Functions that make masks."""
PAIRS = tuple(
    name
    for word in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
    for name in (word, f"__{word}__", f"__r{word}__", f"__i{word}__", f"{word}_")
)
ELEMENTWISE = (
    *(*PAIRS, "div", "div_", "floor_divide", "remainder", "rsub", "neg", "__neg__"),
    *("abs", "__abs__", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "reciprocal"),
    *("sin", "cos", "atan", "arctan", "erf", "sign", "floor", "round", "clamp"),
    *("minimum", "maximum", "sigmoid", "logsigmoid", "tanh", "relu", "gelu", "silu", "elu"),
    *("leaky_relu", "softplus", "float", "double", "int", "long", "to", "detach", "clone"),
)
"""Functions of single elements, by name."""
ALONG = {
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "argmax", "argmin"), 1),
    **dict.fromkeys(("softmax", "log_softmax", "squeeze", "unsqueeze", "unbind"), 1),
    **dict.fromkeys(("cat", "stack"), 1),
    **dict.fromkeys(("chunk", "split"), 2),
}
"""Functions along axes, by name, and the position of the axes among their arguments."""
REDUCTIONS = ("sum", "mean", "max", "min", "var", "std", "norm")
"""Functions of all elements, by name."""
VIEWS = ("reshape", "view", "squeeze", "flatten")
LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
"""Losses of single elements, by name."""


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
    """Context that also runs operations on elements selected by a mask on the whole tensor.

    If an operation cannot run on the whole tensor, its result has a size that is not known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._selected: dict[int, Selected] = {}
        self._compared: dict[int, tuple[Tensor, object]] = {}
        self._led: dict[int, Selected] = {}
        self._indexes = MaskedIndexes()
        self._by_size = MasksBySize()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, on whole tensors if it takes selected elements."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        followed = self._followed(func, name, args, kwargs)
        if followed is not None:
            result = followed()
            self._by_size.note(func, name, args, kwargs, result)
            return result
        result = func(*args, **kwargs)
        self._by_size.note(func, name, args, kwargs, result)
        if name in COMPARISONS and isinstance(result, FakeTensor):
            key = name, tuple((id(a), a._version) if isinstance(a, Tensor) else a for a in args)
            self._compared[id(result)] = result, (key, args)
        self._indexes.note(name, args, result)
        return result

    def _followed(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """A function for the call on whole tensors; None if the call takes no selected elements."""
        if name == "masked_select":
            return partial(self._masked_select, *args, **kwargs)
        if name == "index_select" and len(args) == 3 and args[1] == 0:
            func, args = Tensor.__getitem__, (args[0], args[2])
        if name == "numel" and args[0].dtype == torch.int64:  # how many positions there are
            mask = self._indexes.mask_of(args[0])
            return None if mask is None else mask.sum
        columns = func is Tensor.__getitem__ and columns_of(args[1]) and self._of(args[0])
        if func in (Tensor.__getitem__, Tensor.__setitem__) and not kwargs and not columns:
            mask, rest = self._indexes.split(args[1])
            if mask is None:
                return self._by_pairs(func, args)
            if not isinstance(args[0], FakeTensor) or mask.dim() > args[0].dim():
                return None
            x = viewed(args[0], mask, rest)
            if func is Tensor.__getitem__:
                return partial(self._select, func, x, mask)
            return partial(self._write, func, x, mask, args[2])
        found = [self._of(argument) for argument in args]
        first = found[0] if found else None
        if name in ("index_add", "index_add_") and len(args) == 4 and args[1] == 0 and found[3]:
            pairs, last = self._indexes.pairs(args[2]), found[3]
            mask = pairs.mask if pairs else self._indexes.mask_of(args[2])
            if mask is not None and not kwargs and self._same(mask, last.mask):
                return lambda: self._added(name, args[0], last, pairs)
        if name in ("view", "reshape") and first and first.mask.dim() == first.whole.dim() == 2:
            rows, columns = args[1:] if len(args) == 3 else args[1]
            count = self._by_size.count(first.mask)
            if count is not None and columns == -1 and same_size(rows, first.mask.shape[0]):
                return lambda: chosen_columns(first.whole, first.mask, count)
        if name in VIEWS and args and id(args[0]) in self._led:
            return lambda: self._without_lead(func, args, kwargs)
        pair = name in ("max", "min") and len(args) == 2 and isinstance(args[1], Tensor)
        if (name in (*ELEMENTWISE, *COMPARISONS) or pair) and any(found):
            return lambda: self._computed(func, args, kwargs)
        joined = name in ("cat", "stack") and [self._of(part) for part in args[0][:]]
        if name in ALONG and (joined or first):
            along = self._along(func, name, joined or [first], args, kwargs)
            if along is not None:
                return along
        if first is None:
            return None
        if name in REDUCTIONS and len(args) == 1 and of_all(kwargs):
            removed = kwargs.get("correction", kwargs.get("unbiased"))
            return lambda: self._reduced(name, first, removed)
        if func is Tensor.__getitem__ and (index := columns_of(args[1])):
            if index[0] is not ...:
                index = (slice(None),) * first.mask.dim() + index
            elif len(index) > first.values.dim():
                return None
            return lambda: self._noted(func(*args), first.whole[index], first.mask)
        if works_on_rows(name, first, args):
            return lambda: self._noted(
                func(*args, **kwargs), func(first.whole, *args[1:], **kwargs), first.mask
            )
        second = found[1] if len(found) == 2 else None
        if second is not None and self._same(first.mask, second.mask):
            return self._loss(func, name, first, second, kwargs)
        return None

    def _of(self, value: Any) -> Selected | None:
        """The selected elements that `value` holds; None if it holds none."""
        found = self._selected.get(id(value)) if isinstance(value, FakeTensor) else None
        return found if found and found.version == value._version else None

    def _noted(self, values: Tensor, whole: Tensor, mask: Tensor) -> Tensor:
        self._selected[id(values)] = Selected(values, whole, mask, values._version)
        return values

    def _select(self, func: Any, x: Tensor, mask: Tensor) -> Tensor:
        # Fill with ones: gradients of logarithms, roots and quotients stay finite there.
        whole = torch.where(like(mask, x), x, torch.ones((), dtype=x.dtype))
        return self._noted(func(x, mask), whole, mask)

    def _masked_select(self, input: Tensor, mask: Tensor) -> Tensor:
        if input.shape != mask.shape:
            input, mask = torch.broadcast_tensors(input, mask)  # type: ignore[no-untyped-call]
        return self._select(Tensor.__getitem__, input, mask)

    def _write(self, func: Any, x: Tensor, mask: Tensor, values: Any) -> None:
        selected = self._of(values)
        same = selected is not None and self._same(mask, selected.mask)
        if selected and same and x.shape[mask.dim() :] == selected.whole.shape[mask.dim() :]:
            x.copy_(torch.where(like(mask, x), selected.whole.to(x.dtype), x))
        else:
            func(x, mask, values)

    def _by_pairs(self, func: Any, args: tuple[Any, ...]) -> Callable[[], Any] | None:
        """A function that reads or writes at positions along axes of a mask; None for others."""
        x, pairs = args[0], self._indexes.pairs(args[1])
        if pairs is None or not isinstance(x, FakeTensor):
            return None
        if func is Tensor.__setitem__:
            last = self._of(args[2])
            one = len(pairs.axes) == 1 and not pairs.lead and not pairs.rest
            if last is None or not one or not self._same(pairs.mask, last.mask):
                return None
            return partial(self._write_pairs, x, pairs, last)
        whole = pairs.view(x)
        return None if whole is None else partial(self._read_pairs, func, x, args[1], pairs, whole)

    def _read_pairs(self, func: Any, x: Tensor, index: Any, pairs: Pairs, whole: Tensor) -> Tensor:
        values: Tensor = func(x, index)
        whole = torch.where(like(pairs.mask, whole), whole, torch.ones((), dtype=whole.dtype))
        if pairs.lead:
            self._led[id(values)] = Selected(values, whole, pairs.mask, values._version)
            return values
        return self._noted(values, whole, pairs.mask)

    def _without_lead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow values (1, selected, ...) that become (selected, ...)."""
        led, values = self._led[id(args[0])], func(*args, **kwargs)
        if isinstance(values, Tensor) and values.dim() == led.values.dim() - 1:
            return self._noted(values, led.whole, led.mask)
        return values

    def _write_pairs(self, x: Tensor, pairs: Pairs, values: Selected) -> None:
        """Write at positions that each occur once, as tokens do for one expert."""
        chosen = torch.where(like(values.mask, values.whole), values.whole, 0.0)
        mask = pairs.sums(values.mask.to(torch.int64)) > 0
        x.copy_(torch.where(like(mask, x), pairs.sums(chosen).to(x.dtype), x))

    def _added(self, name: str, x: Tensor, source: Selected, pairs: Pairs | None) -> Tensor:
        added = torch.where(like(source.mask, source.whole), source.whole, 0.0)
        added = pairs.sums(added) if pairs else added
        return x.add_(added) if name.endswith("_") else x + added

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = [selected for argument in args if (selected := self._of(argument))]
        more = [a for a in args if not self._of(a)] + [*kwargs.values()]
        others = [a for a in more if isinstance(a, Tensor) and a.dim()]
        wholes = [s.whole if (s := self._of(argument)) else argument for argument in args]
        values = func(*args, **kwargs)  # may write into `args`
        if others or not all(self._same(found[0].mask, other.mask) for other in found):
            self._selected.pop(id(values), None)
            return values
        writes = func.__name__.endswith("_") or kwargs.get("inplace")
        if writes and wholes[0] is not args[0]:
            wholes[0] = wholes[0].clone()
        return self._noted(values, func(*wholes, **kwargs), found[0].mask)

    def _along(
        self,
        func: Any,
        name: str,
        found: list[Selected | None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[[], Any] | None:
        """A function for `func` along axes of each selected row; None if it takes other axes."""
        first, position = found[0], ALONG[name]
        given = args[position] if len(args) > position else kwargs.get("dim")
        axes = given if isinstance(given, tuple | list) else (given,)
        if first is None or not all(isinstance(axis, int) for axis in axes):
            return None
        size = first.values.dim() + (name in ("stack", "unsqueeze"))
        same = all(part is not None and self._same(first.mask, part.mask) for part in found)
        if not same or any(axis % size == 0 for axis in axes):
            return None
        # Counted from the end, an axis has the same number in the rows and in the whole tensor.
        behind = [axis % size - size for axis in axes]
        axis = behind if axes is given else behind[0]
        wholes = [part.whole for part in found if part is not None]
        source = wholes if name in ("cat", "stack") else wholes[0]
        others = {key: value for key, value in kwargs.items() if key != "dim"}

        def compute() -> Any:
            values = func(*args, **kwargs)
            whole = func(source, *args[1:position], axis, *args[position + 1 :], **others)
            if isinstance(values, Tensor):
                return self._noted(values, whole, first.mask)
            return type(values)(map(partial(self._noted, mask=first.mask), values, whole))

        return compute

    def _reduced(self, name: str, selected: Selected, correction: Any = None) -> Tensor:
        """The sum, mean, extreme, deviation or norm of all selected elements."""
        whole = selected.whole
        mask = like(selected.mask, whole).expand_as(whole)

        def others(values: Tensor, rest: float) -> Tensor:
            return torch.where(mask, values, torch.full((), rest, dtype=values.dtype))

        if name in ("max", "min"):
            limits = torch.finfo if whole.is_floating_point() else torch.iinfo
            bounds = limits(whole.dtype)
            return (
                others(whole, bounds.min).max()
                if name == "max"
                else others(whole, bounds.max).min()
            )
        if name == "norm":
            return others(whole, 0).square().sum().sqrt()
        total, count = others(whole, 0).sum(), mask.sum()
        if name in ("sum", "mean"):
            return total if name == "sum" else total / count
        removed = 1 if correction is None else int(correction)
        variance = others((whole - total / count).square(), 0).sum() / (count - removed)
        return variance if name == "var" else variance.sqrt()

    def _loss(
        self, func: Any, name: str, x: Selected, y: Selected, kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """A function for the loss `func` of selected elements; None if it is no such loss."""
        reduction = kwargs.get("reduction", "mean")
        weighted = any(isinstance(value, Tensor) for value in kwargs.values())
        if weighted or reduction not in ("mean", "sum"):
            return None
        single = kwargs | {"reduction": "none"}
        if name in LOSSES and x.whole.shape == y.whole.shape:
            whole = x.whole, y.whole
            return lambda: self._reduced(reduction, x._replace(whole=func(*whole, **single)))
        rows = y.mask.dim() == y.whole.dim() == x.whole.dim() - 1
        if func in (functional.cross_entropy, functional.nll_loss) and rows:
            counted = y.mask & (y.whole != kwargs.get("ignore_index", -100))
            whole = x.whole.flatten(0, -2), y.whole.flatten()
            return lambda: self._reduced(
                reduction, Selected(x.values, func(*whole, **single), counted.flatten(), x.version)
            )
        return None

    def _same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two masks are the same tensor, or the same comparison of the same tensors."""
        if one is other:
            return True
        keys = [self._compared.get(id(mask), (mask, (mask, ())))[1] for mask in (one, other)]
        return keys[0][0] == keys[1][0]  # type: ignore[index,no-any-return]


def of_all(options: dict[str, Any]) -> bool:
    """Whether these options of a reduction leave it one of all elements, in the usual norm."""
    own = {key: value for key, value in options.items() if key not in ("unbiased", "correction")}
    norm = own.pop("p", 2)
    return norm in ("fro", 2) and all(value is None or value is False for value in own.values())


def chosen_columns(whole: Tensor, mask: Tensor, count: Any) -> Tensor:
    """The elements (n, count) of `whole` that `mask` selects, as many in each row."""
    rows, size = mask.shape
    numbers = torch.arange(size)
    before = (numbers[:, None] <= numbers).to(torch.float32)
    # Each selected element is added to zeros at its place. All other elements are zero there.
    place = torch.where(mask, mask.to(torch.float32) @ before - 1, 0).long()
    chosen = torch.where(mask, whole, 0).to(torch.promote_types(whole.dtype, torch.float32))
    places = torch.zeros(rows, count, dtype=chosen.dtype).scatter_add(1, place, chosen)
    return places.to(whole.dtype)


def columns_of(index: Any) -> tuple[Any, ...]:
    """The part of `index` behind the rows, if it takes all rows, as in `x[:, 0]`; else empty.

    It begins with an ellipsis if it counts from the last axis, as in `x[..., 0]`.
    """
    if not isinstance(index, tuple) or len(index) < 2 or index[0] not in (slice(None), ...):
        return ()
    plain = all(part is None or isinstance(part, int | slice) for part in index[1:])
    return index[index[0] is not ... :] if plain else ()


def works_on_rows(name: str, x: Selected, args: tuple[Any, ...]) -> bool:
    """Whether the layer `name` works on each selected row of `x` alone."""
    own = x.whole.dim() - x.mask.dim()
    return (name == "linear" and own > 0) or (
        name == "layer_norm" and len(args) > 1 and own >= len(args[1])
    )


def like(mask: Tensor, x: Tensor) -> Tensor:
    """`mask`, with further axes of size one so that it has as many as `x`."""
    return mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
