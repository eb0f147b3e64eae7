"""Finds the mask in an index, such as `x[mask]`, `x[mask, 0]` and `x[torch.where(mask)]`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Places(NamedTuple):
    """The positions along one axis where a mask is true.

    Attributes:
        values: The positions, kept so that their id stays their own.
        mask: The mask.
        axis: The axis.
        version: The version of `mask` when it was noted; a later write into the mask changes the
            version.
    """

    values: Tensor
    mask: Tensor
    axis: int
    version: int


class Pairs(NamedTuple):
    """An index by positions along some axes of a mask, as in `x[None, rows]` and `x[rows, 0]`.

    Attributes:
        mask: The mask.
        axes: The axes of the mask, in the order of the index.
        lead: Whether the index begins with None.
        rest: The rest of the index.
    """

    mask: Tensor
    axes: tuple[int, ...]
    lead: bool
    rest: tuple[Any, ...]

    def view(self, x: Tensor) -> Tensor | None:
        """`x` for all places of the mask, true or not; None if its sizes are not those of the mask.

        The first axes are those of the mask.
        """
        count, mask = len(self.axes), self.mask
        if x.dim() < count or any(
            not same_size(x.shape[n], mask.shape[axis]) for n, axis in enumerate(self.axes)
        ):
            return None
        order = sorted(range(count), key=self.axes.__getitem__)
        x = x.permute(*order, *range(count, x.dim()))
        for axis in range(mask.dim()):
            x = x if axis in self.axes else x.unsqueeze(axis)
        x = x[(slice(None),) * mask.dim() + self.rest] if self.rest else x
        return x.expand(*mask.shape, *x.shape[mask.dim() :])

    def sums(self, whole: Tensor) -> Tensor:
        """The sums of `whole` for each position along the only axis of this index."""
        others = [axis for axis in range(self.mask.dim()) if axis != self.axes[0]]
        return whole.sum(others) if others else whole


def same_size(one: Any, other: Any) -> bool:
    """Whether two sizes are equal for every batch."""
    return str(one) == str(other)


class MaskedIndexes:
    """The masks of a recording by the positions where they are true."""

    def __init__(self) -> None:
        self._places: dict[int, Places] = {}
        self._rows: dict[int, Places] = {}

    def note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note the positions that `torch.where(mask)` or `mask.nonzero(as_tuple=True)` returns."""
        if name in ("squeeze", "flatten", "view", "reshape", "__getitem__", "select"):
            self._note_rows(args, result)
        if name not in ("where", "nonzero") or len(args) != 1:
            return
        (mask,) = args
        if not isinstance(mask, FakeTensor) or not mask.dim():
            return
        mask = mask if mask.dtype == torch.bool else mask != 0
        if isinstance(result, Tensor) and mask.dim() == 1:  # (selected, 1)
            self._rows[id(result)] = Places(result, mask, 0, mask._version)
        for axis, values in enumerate(result if isinstance(result, tuple) else ()):
            self._places[id(values)] = Places(values, mask, axis, mask._version)

    def _note_rows(self, args: tuple[Any, ...], result: Any) -> None:
        """Note the positions in the only column that `nonzero` returns for a mask of one axis."""
        rows = self._rows.get(id(args[0])) if args else None
        if rows is not None and isinstance(result, Tensor) and result.dim() == 1:
            self._places[id(result)] = rows._replace(values=result)

    def pairs(self, index: Any) -> Pairs | None:
        """Read `index` if it begins with positions of a mask; None if it is another index."""
        parts = index if isinstance(index, tuple) else (index,)
        lead = len(parts) > 1 and parts[0] is None
        found = list[Places]()
        for part in parts[lead:]:
            place = self._places_of(part)
            if place is None or (found and place.mask is not found[0].mask):
                break
            found.append(place)
        rest = parts[lead + len(found) :]
        plain = all(part is None or isinstance(part, int | slice) for part in rest)
        axes = tuple(place.axis for place in found)
        if not found or not plain or len(set(axes)) < len(axes):
            return None
        return Pairs(found[0].mask, axes, lead, rest)

    def mask_of(self, index: Any) -> Tensor | None:
        """The mask that selects the same as `index`, a mask or the positions of a mask of one axis.

        None if there is no such mask.
        """
        if not isinstance(index, FakeTensor):
            return None
        if index.dtype == torch.bool and index.dim():
            return index
        places = self._places_of(index)
        return places.mask if places and places.mask.dim() == 1 else None

    def _places_of(self, index: Any) -> Places | None:
        places = self._places.get(id(index))
        return places if places and places.version == places.mask._version else None

    def split(self, index: Any) -> tuple[Tensor | None, tuple[Any, ...]]:
        """The mask with which `index` begins, and the rest of `index`; None if there is no mask."""
        if not isinstance(index, tuple | list):
            return self.mask_of(index), ()
        if not index:
            return None, ()
        first = self._places_of(index[0])
        mask, count = self.mask_of(index[0]), 1
        if first is not None and first.mask.dim() > 1:
            mask, count = first.mask, first.mask.dim()
            places = [self._places_of(part) for part in index[:count]]
            axes = [place.axis for place in places if place and place.mask is mask]
            if axes != list(range(count)):
                return None, ()
        rest = tuple(index[count:])
        plain = all(part is None or isinstance(part, int | slice) for part in rest)
        return (mask, rest) if plain else (None, ())


def viewed(x: Tensor, mask: Tensor, rest: tuple[Any, ...]) -> Tensor:
    """The view of `x` that `mask` alone indexes, if `rest` follows the mask in the index."""
    if all(part == slice(None) for part in rest):
        return x
    return x[(slice(None),) * mask.dim() + rest]
