"""Records models that cut sequences to the longest one of a batch. A recording keeps all steps.

`x[:, :longest]` has a size that depends on values. If the model masks the steps that do not count,
its results do not change if all steps are kept. `cut_check.py` checks this.
"""

from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from exporters.programs import source_lines
from exporters.programs.seeded_random import DRAW, UNIFORM, SeededBernoulli
from exporters.recording.replacements.function_forms.index_forms import CUT_LINES, CutLine

aten = torch.ops.aten
CUTS = "lines that cut sequences"
"""The key in the `meta` of a graph."""
COUNTS = ("sum", "count_nonzero")
"""Functions that count the true elements of a mask."""
KEPT = (
    *("max", "amax", "item", "clone", "detach", "to", "int", "long", "cpu", "clamp", "reshape"),
    *("clamp_min", "squeeze", "view", "__getitem__"),
)
"""Functions whose results are at most as large as the counts in their arguments."""


class CutSequences(TorchFunctionMode):
    """Context in which `x[:, :n]` keeps all steps if the number `n` depends on values.

    Attributes:
        lines: The user's lines that cut sequences.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[CutLine] = []
        # Counts, which must live as long as their ids are used, and the largest possible count.
        self._counts: dict[int, tuple[Tensor, int]] = {}

    def __enter__(self) -> Self:
        self._token = CUT_LINES.set(self.lines)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        CUT_LINES.reset(self._token)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`. If it is `torch.arange`, return all numbers up to the largest count."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func is torch.arange:
            args = tuple(self._largest(value, value) for value in args)
        result = func(*args, **kwargs)
        if name in COUNTS and isinstance(args[0], FakeTensor) and args[0].dtype == torch.bool:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            size = args[0].shape[dim] if isinstance(dim, int) else None
            if isinstance(size, int):
                self._counts[id(result)] = result, size
        largest = self._largest(args[0], 0) if name in KEPT and args else 0
        if largest and isinstance(result, FakeTensor):
            self._counts[id(result)] = result, largest
        return result

    def _largest(self, value: Any, otherwise: Any) -> Any:
        """The largest value of a count; `otherwise` for other values."""
        known = self._counts.get(id(value)) if isinstance(value, FakeTensor) else None
        return known[1] if known else otherwise


class Cutting(TorchFunctionMode):
    """Context that stores in `cut` whether the user's `line` takes only a part of a tensor."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.line, self.cut = line, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` unchanged."""
        result = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and result.numel() < args[0].numel():
            self.cut |= source_lines.running_line() == self.line
        return result


class SameDraws(SeededBernoulli):  # type: ignore[no-untyped-call]
    """Context in which dropouts keep all elements, and all drawn numbers are 0.5."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace draws; run other operators unchanged."""
        if func is UNIFORM:
            return torch.full(args[0], 0.5)
        if func is DRAW:
            return torch.ones_like(args[0])
        if func is aten.bernoulli_.float:
            return args[0].fill_(1)
        return func(*args, **(kwargs or {}))
