"""Trainings in float64, with PyTorch's own gradients: what a board's updates are compared with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from device_agent.formats.bundle import open_bundle
from device_agent.training import signature_runs
from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import in_double_precision, trace_for_torch
from toolkit.submodels.submodel import Submodel


class ExactSession:
    """A traced signature in float64; only its results are rounded. `values` are in its graph."""

    def __init__(
        self, signature: ProgramSignature, inputs: frozenset[str], values: Mapping[str, np.ndarray]
    ) -> None:
        self.graph = in_double_precision(trace_for_torch(signature))
        self.ports = signature.inputs
        self.names = [port.name for port in signature.outputs]
        self.inputs, self.outputs, self.values = inputs, frozenset(self.names), values

    def run(
        self, feeds: Mapping[str, np.ndarray], over: Mapping[str, str] | None = None
    ) -> dict[str, np.ndarray]:
        """See Session. Nothing is written over an input."""
        with torch.inference_mode():
            results = self.graph(
                *(
                    exact(feeds[port.name] if port.name in feeds else self.values[port.state or ""])
                    for port in self.ports
                )
            )
        return {
            name: (value.float() if value.dtype == torch.float64 else value).numpy()
            for name, value in zip(self.names, results, strict=True)
        }


def exact(value: np.ndarray) -> torch.Tensor:
    """`value` in float64 if it is float32."""
    tensor = torch.from_numpy(np.asarray(value))
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def exact_sessions(submodel: Submodel, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let trainings of bundles of `submodel`, made with the weights `values`, run in float64."""
    signatures = {signature.name: signature for signature in submodel.program.signatures}
    stored = {name: value.detach().numpy() for name, value in values.items()}

    def opened(runtime: str, graph: Path, name: str, threads: int) -> ExactSession:
        ports = open_bundle(graph.parent).manifest.signatures[name].inputs
        return ExactSession(signatures[name], frozenset(port.name for port in ports), stored)

    with patch.object(signature_runs, "open_session", opened):
        yield
