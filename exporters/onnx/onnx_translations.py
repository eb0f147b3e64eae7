"""Translations of operators that are simpler than those of torch.onnx."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import onnx_ir
import torch
from onnxscript import opset18

aten = torch.ops.aten
onnx: Any = opset18


def split(x: onnx_ir.Value, sizes: Sequence[int], axis: int = 0) -> Sequence[onnx_ir.Value]:
    """One Split for equal parts, else one Slice per part; torch.onnx would make a sequence."""
    if len(set(sizes)) == 1:
        parts = onnx.Split(x, axis=axis, num_outputs=len(sizes))
        return parts if isinstance(parts, Sequence) else [parts]
    bounds = pairwise([0, *accumulate(sizes)])
    return [onnx.Slice(x, [first], [end], [axis]) for first, end in bounds]


def numel(x: onnx_ir.Value) -> onnx_ir.Value:
    """The number of elements if it depends on the batch; torch.onnx cannot translate it."""
    size: onnx_ir.Value = onnx.Size(x)
    return size


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.sym_numel.default: numel,
    aten.split_with_sizes.default: split,
}
