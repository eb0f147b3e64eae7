"""Makes the files of an inference bundle, and runs them in the device's runtime."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.bundle import Bundle
from device_agent.formats.manifest import Manifest
from device_agent.inference.predictor import stages
from device_agent.runtime.runtime_choice import open_session
from exporters.bundle_writer import bundle_files, peak_bytes
from exporters.export import verified_graphs
from exporters.programs.program import Program, inference_program, with_preprocessing
from exporters.quantization.precision import converted
from exporters.runtime_graph import Graph, Graphs
from exporters.verification.verdict import Verdict
from profiles.progress import Report
from profiles.text_formatting import counted
from toolkit.deployment.targets import Target
from toolkit.deployment.trained_model import TrainedModel
from toolkit.submodels.rolling_window import in_round

THREADS = 0
"""0 means one thread for each core."""
BATCH = 32
"""Samples that calibrate a stage in one run."""


@dataclass(frozen=True)
class InferenceBundle:
    """The files of an inference bundle, not written yet.

    Attributes:
        program: Its program, with the signature `predict` and the stages before it.
        graphs: One graph for each signature, with the weights inside, in the order in which the
            graphs run.
        float32: The same graphs with float32 weights.
        calibrated_on: How many samples determined the value ranges for int8.
        files: The content of each file, by file name.
        verdict: The comparison of the float32 graphs with PyTorch.
    """

    program: Program
    graphs: Graphs
    float32: Graphs
    calibrated_on: int | None
    files: Mapping[str, bytes]
    verdict: Verdict | None

    @property
    def memory(self) -> int | None:
        """The predicted peak of a prediction in bytes: the peak of the largest stage."""
        peaks = [peak_bytes(graph, 1) for graph in self.graphs.values()]
        return None if None in peaks else max(peak for peak in peaks if peak is not None)


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
    float32 = {signature.name: verified.graphs[signature.name] for signature in program.signatures}
    samples = None
    if target.precision == "int8":
        samples = trained.calibration_samples
        report(f"calibrating int8 on {counted(len(samples), 'sample')}")
    inputs = calibrating_inputs(program, float32, samples)
    graphs = {
        s.name: converted(float32[s.name], target.precision, s.name, s.inputs[0].name, x)
        for s, x in zip(program.signatures, inputs, strict=True)
    }
    files = bundle_files(program, graphs, values, base)
    calibrated_on = None if samples is None else len(samples)
    return InferenceBundle(program, graphs, float32, calibrated_on, files, verified.verdict)


def calibrating_inputs(
    program: Program, float32: Graphs, samples: np.ndarray | None
) -> Iterator[np.ndarray | None]:
    """Yield the inputs that calibrate each stage of `program`; yield None if `samples` is None."""
    x = samples
    for signature in program.signatures:
        yield x
        if x is not None and signature is not program.signatures[-1]:
            run = run_graph(float32[signature.name], signature.name)
            x = np.concatenate([run(x[start : start + BATCH]) for start in range(0, len(x), BATCH)])


def run_graph(graph: Graph, name: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function that runs the signature `name` of `graph`, which has one input and one output."""
    with TemporaryDirectory() as folder:
        file = Path(folder, graph.file)
        file.write_bytes(graph.data)
        session = open_session(graph.runtime, file, name, THREADS)
    (x,), (output,) = session.inputs, session.outputs
    return lambda samples: session.run({x: samples})[output]


def runner(manifest: Manifest, folder: Path, threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function that runs samples through all graphs of an inference bundle, in their order.

    All graphs stay open. `folder` has the files of the graphs.
    """
    opened = []
    for name in stages(manifest):
        signature = manifest.signatures[name]
        session = open_session(manifest.runtime, folder / signature.graph, name, threads)
        opened.append((session, signature.inputs[0].name, signature.outputs[0].name))

    def run(x: np.ndarray) -> np.ndarray:
        for session, entry, output in opened:
            x = session.run({entry: x})[output]
        return x

    return run


def predictor(bundle: Bundle) -> Callable[[Tensor], Tensor]:
    """A function that runs a batch of samples in the bundle's runtime."""
    run = runner(bundle.manifest, bundle.folder, THREADS)
    return lambda samples: torch.from_numpy(run(samples.numpy()))
