"""Export a submodel of a model as a bundle, and report its sizes."""

import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import nn

from device_agent.formats.atomic_files import fingerprint, write_file
from device_agent.formats.bundle import read_manifest
from device_agent.formats.manifest import MANIFEST
from device_agent.formats.preprocessing import Preprocessing
from device_agent.training.memory_estimate import training_bytes
from exporters.bundle_writer import peak_bytes
from exporters.export import Format, export
from exporters.graph_figures import figures_of
from exporters.programs.operation_counts import macs
from exporters.programs.program import ProgramSignature, with_preprocessing
from exporters.recording.capture import SharedRecording
from exporters.recording.inputs.sample_range import NO_INPUTS, Inputs
from exporters.runtime_graph import Graph
from exporters.verification.verdict import Verdict
from profiles.errors import InputError
from toolkit.exporting.approximation import Fit, fit
from toolkit.exporting.output_places import check_places
from toolkit.inspection import Inspection, describe
from toolkit.splitting import split
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.model_loading import load_global
from toolkit.submodels.submodel import Submodel

EXPORT_VERSION = 1
Log = logging.Logger | logging.LoggerAdapter[logging.Logger]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What to export, and where to write it.

    Attributes:
        model: The model reference, `package.module:callable`.
        sample_shape: Shape of one sample, without the batch.
        spec: The submodel.
        out: The bundle's folder.
        weights: A weights file for the model; None for initial weights.
        seed: Seed of the initial weights.
        format: The runtime's format.
        training: The hyper-parameters of local training.
        save_weights: A file for the global model that the bundle is cut from, or None.
        verify: Whether to compare the bundle with PyTorch. None compares only the graphs that no
            earlier export has compared.
        force: Replace an existing bundle and an existing weights file.
        dry_run: Write nothing.
        preprocessing: How pictures or CSV files of a device become samples.
        inputs: What you know about the samples: the range of their numbers, and the inputs that are
            packed into one sample.
    """

    model: str
    sample_shape: tuple[int, ...]
    spec: str
    out: Path
    weights: Path | None = None
    seed: int = 0
    format: Format = "onnx"
    training: TrainingConfig = field(default_factory=TrainingConfig)
    save_weights: Path | None = None
    verify: bool | None = None
    force: bool = False
    dry_run: bool = False
    cache: bool = True
    preprocessing: Preprocessing | None = None
    inputs: Inputs = NO_INPUTS


@dataclass(frozen=True)
class SignatureCost:
    """The cost of one graph for one batch.

    Attributes:
        name: The signature.
        operators: Number of operators in the graph.
        macs: Multiply-accumulates.
        graph_bytes: Size of the graph.
        peak_bytes: Predicted peak above the memory of an idle agent; None if not known.
        computed_again: Share of the graph's work that computes activations a second time. This
            saves memory; the option `recompute` controls it. None if not known.
    """

    name: str
    operators: int
    macs: int
    graph_bytes: int
    peak_bytes: int | None
    computed_again: float | None


@dataclass(frozen=True)
class Exported:
    """One exported bundle. After a dry run all but `out` and `inspection` are empty.

    Attributes:
        out: The bundle's folder.
        inspection: The sizes of the submodel.
        bundle_sha256: Hash of the manifest.
        bytes: Size of all files.
        signatures: The cost of each graph.
        training: The predicted memory peak of training, and the names of the signatures that run
            at the peak. The peak is in bytes above the memory of an idle agent. None if not known.
        verdict: The result of the verification; None if it was skipped.
        fit: How well factors approximate the weights; None if nothing is factorized.
    """

    out: Path
    inspection: Inspection
    bundle_sha256: str | None = None
    bytes: int | None = None
    signatures: tuple[SignatureCost, ...] = ()
    training: tuple[int, str] | None = None
    verdict: Verdict | None = None
    fit: Fit | None = None
    reused: int = 0
    verified_earlier: bool = False


@dataclass(frozen=True)
class Origin:
    """The model that bundles are cut from.

    It has the module, its weights, its recorded graphs and the full submodel.
    """

    model: nn.Module
    numbers: GlobalModel
    recording: SharedRecording
    full: Submodel


def export_bundle(request: Request) -> Exported:
    """Export one submodel as a bundle folder. Each stage is logged.

    Args:
        request: What to export, and where to write it.

    Returns:
        The sizes of the bundle and the result of its verification.

    Raises:
        InputError: The model, the weights, the spec or the output folder cannot be used.
        ExportError: The submodel cannot be exported.
        VerificationError: The bundle and PyTorch disagree.
    """
    check_places(request.out, request.save_weights, request.force)
    origin = load_origin(request)
    exported = export_from(origin, request)
    # Write the bundle first: if the disk is full here, the bundle is complete.
    save_weights(origin, request)
    return exported


def load_origin(request: Request) -> Origin:
    """Load the model of `request`. Raises ModelError or InputError."""
    logger.info("loading the model")
    model, numbers = load_global(request.model, request.weights, request.seed, request.inputs)
    numbers.lend_to(model)  # the model is not trained, so its weights need not be in memory twice
    recording = SharedRecording(model, request.sample_shape)
    with recording:
        full = split(model, "full", request.sample_shape, request.training)
    return Origin(model, numbers, recording, full)


def save_weights(origin: Origin, request: Request) -> None:
    """Write the global model if `request` asks for it. Raises InputError if that fails."""
    if request.save_weights is None or request.dry_run:
        return
    try:
        write_file(request.save_weights, origin.numbers.save())
    except OSError as error:
        raise InputError(
            "The weights cannot be saved as {file}: {reason}. The bundle in {out} is complete. "
            "Free some space and export again with --force.",
            code="file.system-error",
            file=str(request.save_weights),
            reason=error.strerror,
            out=request.out,
        ) from error


def export_from(origin: Origin, request: Request, log: Log = logger) -> Exported:
    """Export the submodel of `request`, cut from `origin`. Raises the errors of `export_bundle`."""
    log.info("splitting %s", request.spec)
    with origin.recording:
        submodel = split(origin.model, request.spec, request.sample_shape, request.training)
    program = with_preprocessing(submodel.program, request.preprocessing)
    inspection = describe(submodel, origin.full)
    if request.dry_run:
        return Exported(request.out, inspection)
    if any(entry.factor is not None for entry in submodel.program.tensors):
        log.info("factorizing the weights")
    values = submodel.cut(origin.numbers)
    exported = export(
        program,
        values,
        request.out,
        base=origin.numbers.fingerprint(),
        format=request.format,
        check=request.verify,
        force=request.force,
        report=log.info,
        cache=request.cache,
    )
    # Read the manifest as it was written, because a device computes its memory from it.
    manifest = (request.out / MANIFEST).read_bytes()
    return Exported(
        out=request.out,
        inspection=inspection,
        bundle_sha256=fingerprint(manifest).sha256,
        bytes=sum(file.stat().st_size for file in request.out.iterdir()),
        signatures=tuple(
            cost(signature, exported.graphs[signature.name], request.training.batch_size)
            for signature in submodel.program.signatures
        ),
        training=training_bytes(read_manifest(manifest, request.out / MANIFEST)),
        verdict=exported.verdict,
        fit=fit(submodel, values, origin.numbers),
        reused=len(exported.reused),
        verified_earlier=exported.verified_earlier,
    )


def cost(signature: ProgramSignature, graph: Graph, batch: int) -> SignatureCost:
    """The cost of `graph`, the exported form of `signature`, for `batch` samples."""
    return SignatureCost(
        name=signature.name,
        operators=graph.operators,
        macs=macs(signature, batch),
        graph_bytes=graph.size,
        peak_bytes=peak_bytes(graph, batch),
        computed_again=figures_of(graph, batch).computed_again,
    )


def as_json(exported: Exported) -> dict[str, object]:
    """The document that `export --json` prints."""
    verdict = exported.verdict
    return {
        "version": EXPORT_VERSION,
        "out": str(exported.out),
        "submodel": exported.inspection.submodel,
        "params": exported.inspection.params,
        "capacity": exported.inspection.capacity,
        "weights_bytes": exported.inspection.bytes,
        "fit": exported.fit and asdict(exported.fit),
        "bundle_sha256": exported.bundle_sha256,
        "bundle_bytes": exported.bytes,
        "signatures": [asdict(signature) for signature in exported.signatures],
        "training_peak_bytes": exported.training and exported.training[0],
        "reused_graphs": exported.reused,
        "verified_earlier": exported.verified_earlier,
        "verification": verdict
        and {
            "relative_error": verdict.error,
            "tolerance": verdict.tolerance,
            "signature": verdict.signature,
            "output": verdict.output,
            "operator": verdict.operator,
            "step": verdict.step,
            "steps": verdict.steps,
            "seed": verdict.seed,
        },
    }
