"""Runs float32 code in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from exporters.programs.program import ProgramSignature

aten = torch.ops.aten


def first_topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True
) -> Any:
    """An `aten.topk` that selects the first of equal numbers."""
    ordered = aten.sort.stable(x, stable=True, dim=dim, descending=largest)
    return tuple(part.narrow(dim, 0, k) for part in ordered)


def precise_linspace(start: Any, end: Any, steps: int, **options: Any) -> Tensor:
    """An `aten.linspace` in float64. If no type is named, PyTorch rounds the numbers to float32."""
    options["dtype"] = options.get("dtype") or torch.float64
    numbers: Tensor = aten.linspace.default(start, end, steps, **options)
    return numbers


DEFINED: dict[Any, Callable[..., Any]] = {
    aten.topk.default: first_topk,
    aten.linspace.default: precise_linspace,
}
"""Operators whose result PyTorch leaves open or rounds, as a graph in float64 computes them."""


class DoublePrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes every operator (and constant) in float64 if the code names float32."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` on float64 copies of its float32 tensors."""
        func = DEFINED.get(func, func)
        return tree_map(doubled, func(*tree_map(doubled, args), **tree_map(doubled, kwargs or {})))


def doubled(value: Any) -> Any:
    """Turn a float32 tensor, or the type float32, into float64. Return other values unchanged."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value


def reference(signature: ProgramSignature, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of `signature` in float64, computed by PyTorch's kernels and autograd."""
    with DoublePrecision():  # type: ignore[no-untyped-call]
        results = signature.function({name: doubled(value) for name, value in feeds.items()})
    return {name: value.detach() for name, value in results.items()}
