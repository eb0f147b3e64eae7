"""torch.onnx's table of operators, built once in a process, with simpler translations added.

torch.onnx would build its table again for every graph. It would parse the source of all its
translations each time. This takes a second of processor time, which is more than for lowering a
small signature.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import onnx_ir
import torch
from onnxscript import opset18
from torch._decomp import decomposition_table

from exporters.decompositions import table
from exporters.decompositions.decomposition import Decomposition
from exporters.programs.torch_internals import replaced

aten = torch.ops.aten
onnx: Any = opset18
OPSET = 18
"""The opset of torch.onnx's own translations. Another opset would need a conversion."""


@cache
def operators() -> dict[Any, list[Any]]:
    """Return torch.onnx's translations by operator name. From now on, torch.onnx copies this table.

    The table is private to torch. If a version of torch does not have this table, the result is
    empty and torch.onnx builds its tables as usual.
    """
    try:
        from onnxscript._internal.values import TracedOnnxFunction
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        build = cache(ONNXRegistry.from_torchlib)
        # The table needs only the domain of a function. onnxscript would parse its source for it.
        domain = property(lambda function: SimpleNamespace(domain=function.opset.domain))
        with replaced([(TracedOnnxFunction, "function_ir", domain)]):
            known: dict[Any, list[Any]] = build(OPSET).functions
    except (ImportError, AttributeError):
        return {}

    def copied(opset_version: int = OPSET) -> Any:
        registry = copy.copy(build(opset_version))
        # An export adds its own translations to its table.
        registry.functions = {name: [*forms] for name, forms in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(copied)  # type: ignore[method-assign]
    return known


@cache
def missing_translations() -> dict[Any, Decomposition]:
    """PyTorch's decompositions of operators that torch.onnx and this table do not translate."""
    translated, ours = operators(), table()
    return {
        operator: form
        for operator, form in decomposition_table.items()
        if operator not in ours and operator.name() not in translated  # type: ignore[no-untyped-call]
    }


def split(x: onnx_ir.Value, sizes: Sequence[int], axis: int = 0) -> Sequence[onnx_ir.Value]:
    """Return one Split if the parts are equal, otherwise one Slice for each part.

    torch.onnx would write a sequence (one value that contains all parts) instead.
    """
    if len(set(sizes)) == 1:
        parts = onnx.Split(x, axis=axis, num_outputs=len(sizes))
        return parts if isinstance(parts, Sequence) else [parts]
    bounds = pairwise([0, *accumulate(sizes)])
    return [onnx.Slice(x, [first], [end], [axis]) for first, end in bounds]


def numel(x: onnx_ir.Value) -> onnx_ir.Value:
    """Compute the number of elements of `x`. torch.onnx fails at this if the batch size is open."""
    size: onnx_ir.Value = onnx.Size(x)
    return size


def sort(
    x: onnx_ir.Value, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Sequence[onnx_ir.Value]:
    """Sort by a TopK of all elements, which keeps the order of equal elements."""
    size = onnx.Gather(onnx.Shape(x), [dim])
    found: Sequence[onnx_ir.Value] = onnx.TopK(x, size, axis=dim, largest=int(descending), sorted=1)
    return found


def atan2(y: onnx_ir.Value, x: onnx_ir.Value) -> onnx_ir.Value:
    """Compute the angle of (x, y). torch.onnx's own translation treats a y of +0 as negative."""
    below = onnx.Or(onnx.Less(y, 0.0), onnx.Less(onnx.Reciprocal(y), 0.0))  # -0 is below 0, too
    angle = onnx.Atan(onnx.Div(y, x))
    angle = onnx.Where(onnx.IsNaN(angle), 0.0, angle)  # of (0, 0)
    half_turn = onnx.Where(below, -math.pi, math.pi)
    found: onnx_ir.Value = onnx.Add(angle, onnx.Where(onnx.Less(x, 0.0), half_turn, 0.0))
    return found


def where(condition: onnx_ir.Value, x: onnx_ir.Value, y: onnx_ir.Value) -> onnx_ir.Value:
    """Choose between two values. ONNX Runtime has no Where for booleans."""
    found: onnx_ir.Value = onnx.Where(condition, x, y)
    if x.dtype == onnx_ir.DataType.BOOL:
        found = onnx.Or(onnx.And(condition, x), onnx.And(onnx.Not(condition), y))
    return found


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.sym_numel.default: numel,
    aten.split_with_sizes.default: split,
    aten.sort.stable: sort,
    aten.atan2.default: atan2,
    aten.where.self: where,
}
