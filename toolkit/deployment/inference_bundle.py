"""Makes the files of an inference bundle, and runs them in the device's runtime."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.bundle import Bundle
from device_agent.formats.manifest import PREDICT
from device_agent.runtime.runtime_choice import open_session
from exporters.bundle_writer import bundle_files
from exporters.export import Format, verified_graphs
from exporters.programs.program import Program, inference_program, with_preprocessing
from exporters.runtime_graph import Graph
from exporters.verification.verdict import Verdict
from profiles.progress import Report
from toolkit.deployment.trained_model import TrainedModel
from toolkit.submodels.round_window import in_round

THREADS = 0
"""0 is one thread for each core."""


@dataclass(frozen=True)
class InferenceBundle:
    """The files of an inference bundle, not written yet.

    Attributes:
        program: Its program, with the single signature `predict`.
        graph: The graph, with the weights inside.
        files: File name to content.
        verdict: The comparison of the float32 graph with PyTorch.
    """

    program: Program
    graph: Graph
    files: Mapping[str, bytes]
    verdict: Verdict | None


def inference_bundle(
    trained: TrainedModel, spec: str, file_format: Format, out: Path, report: Report
) -> InferenceBundle:
    """Compile the submodel `spec` of a trained model for predictions.

    Args:
        trained: The model.
        spec: A submodel that predicts alone, see `predicting_submodel`.
        file_format: `onnx` for ONNX Runtime, `tflite` for LiteRT.
        out: The folder for which it is made. If verification fails, the bundle is kept beside it.
        report: Called with the name of each stage.

    Raises:
        SpecError: The submodel is not possible for this model.
        ExportError: The format does not support an operator of the model.
        VerificationError: Graph and PyTorch disagree.
    """
    report(f"splitting {spec}")
    submodel = in_round(trained.split(spec), max(trained.round or 1, 1))
    if any(entry.factor is not None for entry in submodel.program.tensors):
        report("factorizing the weights")
    values = submodel.cut(trained.weights)
    program = inference_program(with_preprocessing(submodel.program, trained.preprocessing))
    base = trained.weights.fingerprint()
    verified = verified_graphs(program, values, out, base=base, format=file_format, report=report)
    files = bundle_files(program, verified.graphs, values, base)
    return InferenceBundle(program, verified.graphs[PREDICT], files, verified.verdict)


def predictor(bundle: Bundle) -> Callable[[Tensor], Tensor]:
    """A function that runs a batch of samples in the bundle's runtime."""
    (x,), (output,) = (
        bundle.manifest.signatures[PREDICT].inputs,
        bundle.manifest.signatures[PREDICT].outputs,
    )
    session = open_session(bundle.manifest.runtime, bundle.graph(PREDICT), PREDICT, THREADS)

    def predict(samples: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(session.run({x.name: samples.numpy()})[output.name]))

    return predict
