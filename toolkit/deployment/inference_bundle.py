"""Makes the files of an inference bundle, and runs them in the device's runtime."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.bundle import Bundle
from device_agent.formats.manifest import PREDICT
from device_agent.runtime.runtime_choice import open_session
from exporters.bundle_writer import bundle_files
from exporters.export import verified_graphs
from exporters.programs.program import Program, inference_program, with_preprocessing
from exporters.quantization.precision import converted
from exporters.runtime_graph import Graph
from exporters.verification.verdict import Verdict
from profiles.progress import Report
from profiles.text_formatting import counted
from toolkit.deployment.targets import Target
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
        float32: The same graph with float32 weights.
        calibrated_on: How many samples gave the ranges of int8.
        files: File name to content.
        verdict: The comparison of the float32 graph with PyTorch.
    """

    program: Program
    graph: Graph
    float32: Graph
    calibrated_on: int | None
    files: Mapping[str, bytes]
    verdict: Verdict | None


def inference_bundle(trained: TrainedModel, target: Target, report: Report) -> InferenceBundle:
    """Compile the submodel of `target`, cut from a trained model, for predictions.

    Raises:
        SpecError: The submodel is not possible for this model.
        InputError: int8 has no samples to calibrate.
        ExportError: The format does not support an operator of the model, or the precision is not
            possible.
        VerificationError: Graph and PyTorch disagree. The bundle is kept beside `target.out`.
    """
    report(f"splitting {target.submodel.spec}")
    submodel = in_round(trained.split(target.submodel.spec), max(trained.round or 1, 1))
    if any(entry.factor is not None for entry in submodel.program.tensors):
        report("factorizing the weights")
    values = submodel.cut(trained.weights)
    program = inference_program(with_preprocessing(submodel.program, trained.preprocessing))
    base = trained.weights.fingerprint()
    verified = verified_graphs(
        program, values, target.out, base=base, format=target.format, report=report
    )
    float32 = verified.graphs[PREDICT]
    samples = None
    if target.precision == "int8":
        samples = trained.calibration_samples
        report(f"calibrating int8 on {counted(len(samples), 'sample')}")
    x = program.signatures[0].inputs[0].name
    graph = converted(float32, target.precision, PREDICT, x, samples)
    files = bundle_files(program, {PREDICT: graph}, values, base)
    calibrated_on = None if samples is None else len(samples)
    return InferenceBundle(program, graph, float32, calibrated_on, files, verified.verdict)


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
