"""Counts the elements that a mask selects in each row, if only the size of the batch decides this.

Contrastive losses such as SimCLR's compare each sample with all others, and leave out the diagonal:
`similarity[~torch.eye(n, dtype=torch.bool)].view(n, -1)`. Here the mask is computed for some batch
sizes, in parallel with the recording. Suppose that each of its n rows selects the same number of
elements, and that this number is a n + b. Then the selection is a matrix with sizes that a
recording knows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

BATCHES = (3, 5, 8)
"""The batch sizes for which a mask is computed. With two sizes, any counts would fit a line."""
CREATING = ("arange", "eye", "zeros", "ones", "full")
"""Functions that make a tensor of sizes alone, by name."""


class Made(NamedTuple):
    """How a tensor is made.

    Attributes:
        tensor: The tensor, kept so that its id stays its own.
        version: Its version when it was noted; a later write changes the version.
        func: The function that returned it.
        args: The arguments of `func`.
        kwargs: Its further arguments.
    """

    tensor: Tensor
    version: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class MasksBySize:
    """The tensors of a recording that depend on the size of the batch alone."""

    def __init__(self) -> None:
        self._made: dict[int, Made] = {}

    def note(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note how `func` has made `result`, if all tensors that it takes are also of this kind."""
        if not isinstance(result, FakeTensor):
            return
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if (given or name in CREATING) and all(map(self._is_made, given)):
            self._made[id(result)] = Made(result, result._version, func, args, kwargs)

    def count(self, mask: Tensor) -> Any:
        """How many elements each row of `mask` (n, m) selects; None if unknown.

        The number is an int, or an expression of n.
        """
        if not self._is_made(mask):
            return None
        points = []
        for batch in BATCHES:
            try:
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    counts = self._value(mask, batch, {}).sum(1).tolist()
            except (RuntimeError, TypeError, ValueError, IndexError):
                return None
            if len(set(counts)) != 1:
                return None
            points.append((len(counts), counts[0]))
        (n, low), (m, high), (last, most) = points
        slope, left = divmod(high - low, m - n) if m != n else (0, high - low)
        if left or most != low + slope * (last - n):
            return None
        return mask.shape[0] * slope + (low - slope * n) if slope else low

    def _is_made(self, tensor: Tensor) -> bool:
        made = self._made.get(id(tensor))
        return type(tensor) is Tensor or (made is not None and made.version == tensor._version)

    def _value(self, tensor: Tensor, batch: int, known: dict[int, Any]) -> Any:
        """The value of `tensor` for a batch of this size; `known` has values of other tensors."""
        if type(tensor) is Tensor:
            return tensor

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._value(leaf, batch, known)
            if not isinstance(leaf, SymInt):
                return leaf
            expression = leaf.node.expr
            return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))

        if id(tensor) not in known:
            made = self._made[id(tensor)]
            known[id(tensor)] = made.func(*tree_map(real, made.args), **tree_map(real, made.kwargs))
        return known[id(tensor)]
