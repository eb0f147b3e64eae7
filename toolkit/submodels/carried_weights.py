"""Carries the weights of a model over into a changed model, by name and shape.

A tensor of the same name and shape keeps its numbers. A larger tensor of the same name, such as the
head of a model with one more class, keeps the old numbers in its first rows and columns:
`new[:rows, :columns] = old`. All other tensors begin with the initial numbers of the changed model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from profiles.errors import InputError
from toolkit.submodels.global_model import GlobalModel

MOST_NAMES = 20
"""A text names at most this many tensors of each group."""


@dataclass(frozen=True)
class Carried:
    """Which tensors of a model are carried over, by their names.

    Attributes:
        whole: How many tensors keep their numbers.
        part: Larger tensors, which keep the old numbers in a part.
        new: Tensors that begin with initial numbers.
        dropped: Tensors of the earlier model that the changed model does not have.
    """

    whole: int
    part: Sequence[str]
    new: Sequence[str]
    dropped: Sequence[str]

    def text(self) -> str:
        """All groups in one line.

        Examples:
            >>> Carried(8, ["fc.bias (10 of 11)"], [], ["old.bias"]).text()
            '8 kept; 1 kept in part: fc.bias (10 of 11); 1 dropped: old.bias'
        """
        groups = ("kept in part", self.part), ("new", self.new), ("dropped", self.dropped)
        lists = [f"{len(names)} {what}: {_listed(names)}" for what, names in groups if names]
        return "; ".join([f"{self.whole} kept", *lists])


def carry(old: GlobalModel, initial: GlobalModel) -> tuple[GlobalModel, Carried]:
    """The changed model with those weights of `old` that fit.

    Factors that families keep between rounds, and the moments of a server optimizer, are made again
    in the next round.

    Args:
        old: The earlier model.
        initial: The changed model with its initial weights.

    Raises:
        InputError: No tensor of `old` fits.
    """
    known = old.state_dict()
    tensors: dict[str, Tensor] = {}
    part, new, whole = [], [], 0
    for name, first in initial.tensors.items():
        earlier = known.get(name)
        if earlier is None or not _fits(earlier, first):
            tensors[name] = first
            new.append(name)
            continue
        region = tuple(slice(size) for size in earlier.shape)
        tensors[name] = first.clone()
        tensors[name][region] = earlier.to(first.dtype)
        if earlier.shape == first.shape:
            whole += 1
        else:
            part.append(f"{name} ({_size(earlier.shape)} of {_size(first.shape)})")
    if not whole and not part:
        raise InputError(
            "No tensor of the federation's model fits the new model, by name and shape. Set "
            "`model` back, or begin another federation with another `state` folder.",
            code="settings.nothing-carried",
        )
    dropped = [name for name in old.tensors if name not in initial.state_dict()]
    return GlobalModel(tensors, shared=initial.shared), Carried(whole, part, new, dropped)


def _fits(earlier: Tensor, first: Tensor) -> bool:
    """Whether the numbers of `earlier` fit into `first`."""
    numbers = earlier.dtype == first.dtype or (
        earlier.is_floating_point() and first.is_floating_point()
    )
    sizes = zip(earlier.shape, first.shape, strict=False)
    return numbers and earlier.ndim == first.ndim and all(a <= b for a, b in sizes)


def _size(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
