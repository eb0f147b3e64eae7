"""Training steps for tests of the forms of graphs, beside float64 autograd."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from blocked_operators import operators
from device_agent.runtime.onnx_runtime import OnnxSession
from edgetailor import TrainingConfig, split
from exporters.memory.liveness import in_place_of
from exporters.programs.program import Program, ProgramSignature
from exporters.verification.double_precision import reference
from exporters.verification.errors import relative_error
from exporters.verification.example_inputs import examples
from toolkit.submodels.global_model import from_model

CLOSE = 2e-5
LARGER = 100
"""Times the optimizer's state that verification draws. Beside a small change of a weight, its
rounding to float32 would be the larger error."""
CLASSES = 4
FIRST_BATCH = 5
"""Samples in the first of two steps; the second has fewer."""


def tail(channels: int) -> list[nn.Module]:
    """From images with so many channels to classes."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


def with_negative_kernels(data: bytes) -> bytes:
    """The graph `data` with constant kernels of the other sign: it computes wrong numbers."""
    model = onnx.load_from_string(data)
    for node in model.graph.node:
        held = next(
            (attribute.t for attribute in node.attribute if attribute.name == "value"), None
        )
        numbers = np.empty(0) if held is None else numpy_helper.to_array(held)
        if held is not None and numbers.ndim == 4:
            held.CopyFrom(numpy_helper.from_array(-numbers, held.name))
    return model.SerializeToString()


@dataclass(frozen=True)
class Case:
    """The training step of a model, and inputs for it."""

    signature: ProgramSignature
    program: Program
    values: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, shape: tuple[int, ...]) -> "Case":
        training = TrainingConfig(batch_size=5, momentum=0.9, weight_decay=0.01)
        submodel = split(model, "full", shape, training)
        signatures = submodel.program.signatures
        train = next(signature for signature in signatures if signature.name == "train")
        return cls(train, submodel.program, submodel.cut(from_model(model)))

    def feeds(self, seed: int, batch: int, *, state: bool = True) -> dict[str, Tensor]:
        ports = [port for port in self.signature.inputs if state or port.state is None]
        generator = torch.Generator().manual_seed(seed + batch)
        drawn = examples(ports, self.program, self.values, generator, batch)
        kept = {port.name for port in ports if port.state not in (None, *self.values)}
        return {name: LARGER * value if name in kept else value for name, value in drawn.items()}


def check(
    signature: ProgramSignature,
    came: dict[str, np.ndarray],
    feeds: dict[str, Tensor],
    close: float = CLOSE,
) -> None:
    right = reference(signature, feeds)
    for port in signature.outputs:
        result = torch.from_numpy(np.asarray(came[port.name]))
        error = relative_error(result, right[port.name], feeds.get(str(port.state)))
        assert error <= close, f"{port.name}: {error:.1e}"


def check_by_definition(
    case: Case, form: bytes, block: int, feeds: dict[str, Tensor], close: float = CLOSE
) -> None:
    """Run a blocked form with the definitions of its operators."""
    runtime = ReferenceEvaluator(onnx.load_from_string(form), new_ops=operators(block))
    outputs: Any = runtime.run(None, {key: value.numpy() for key, value in feeds.items()})
    check(case.signature, dict(zip(runtime.output_names, outputs, strict=True)), feeds, close)


def check_in_runtime(case: Case, graph: bytes, form: bytes, file: Path, seed: int) -> None:
    """Run two steps of a form of `graph`, written to `file`, with new state over the old."""
    signature = case.signature
    file.write_bytes(form)
    session = OnnxSession(file, threads=1)
    states = {port.state: port.name for port in signature.inputs if port.state is not None}
    assert in_place_of(form) == in_place_of(graph)
    over = {n: states[n.removesuffix("+")] for n in in_place_of(form)}
    feeds = case.feeds(seed, FIRST_BATCH)
    for batch in (FIRST_BATCH, 3):
        feeds |= case.feeds(seed, batch, state=False)
        given = {key: value.numpy().copy() for key, value in feeds.items()}
        came = {key: value.copy() for key, value in session.run(given, over).items()}
        check(signature, came, feeds)
        feeds |= {
            states[port.state]: torch.from_numpy(came[port.name])
            for port in signature.outputs
            if port.state is not None
        }
