"""torch.onnx writes the same graph with and without our shortcuts."""

from contextlib import nullcontext, suppress

import pytest
import torch
from onnx_ir.schemas import OpSignature
from torch import Tensor

from device_agent.formats.manifest import Port
from exporters.onnx import torch_translation
from exporters.onnx.torch_translation import translated
from exporters.onnx.translation_shortcuts import shortcuts
from exporters.programs.program import ProgramSignature, Tensors, samples_port
from exporters.programs.tracing import trace


def mixed_types(feeds: Tensors) -> dict[str, Tensor]:
    """Integers meet floats, numbers and the batch size, so that operands must be converted."""
    x, n = feeds["x"], feeds["n"]
    y = x * n + n // 2 - (n > 1) / x.shape[0]
    return {"output": torch.where(n > 0, y.exp(), n) + torch.arange(3)}


def test_types_are_converted_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = (samples_port((3,)), samples_port((3,), "n", "int64"))
    outputs = (Port(name="output", kind="samples", dtype="float32", shape=(None, 3)),)
    signature = ProgramSignature("mixed", inputs, outputs, mixed_types)
    short = translated(trace(signature), signature).model_proto
    monkeypatch.setattr(torch_translation, "shortcuts", nullcontext)
    full = translated(trace(signature), signature).model_proto
    assert sum(node.op_type == "Cast" for node in full.graph.node) >= 3
    assert short.SerializeToString() == full.SerializeToString()


def test_torch_is_as_before_after_an_error() -> None:
    before = vars(OpSignature)["from_op_schema"]
    with suppress(RuntimeError), shortcuts():
        assert vars(OpSignature)["from_op_schema"] is not before
        raise RuntimeError
    assert vars(OpSignature)["from_op_schema"] is before
