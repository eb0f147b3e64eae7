"""What `edgetailor export` does: load, split, export, and say what came out."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import nn

from device_agent.formats.atomic_files import check_file_place, fingerprint, write_file
from device_agent.formats.bundle import read_manifest
from device_agent.formats.manifest import MANIFEST
from device_agent.training.memory_estimate import training_bytes
from exporters.bundle_writer import peak_bytes
from exporters.export import Format, check_bundle_place, export
from exporters.programs.operation_counts import macs
from exporters.programs.program import ProgramSignature, Report, silent
from exporters.runtime_graph import Graph
from exporters.verification import Verdict
from profiles.errors import InputError
from toolkit.exporting.approximation import Fit, fit
from toolkit.inspection import Inspection, describe
from toolkit.splitting import split
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.model_loading import load_global
from toolkit.submodels.submodel import Submodel
from toolkit.submodels.training_config import TrainingConfig

EXPORT_VERSION = 1


@dataclass(frozen=True)
class Request:
    """What to export and where to. `save_weights` also keeps the global model it is cut from."""

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


@dataclass(frozen=True)
class SignatureCost:
    """One graph: its operators, the multiply-accumulates of one batch, and its size in bytes.

    `peak_bytes` is what a run on one batch is predicted to add to an idle agent's memory; None
    where that is not known.
    """

    name: str
    operators: int
    macs: int
    graph_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Exported:
    """One exported bundle of `bytes` in all.

    `training` is what the most demanding part of its training is predicted to add to an idle
    agent's memory (bytes), and the signatures that run then; None where that is not known. A dry
    run has no bundle hash, no size, no signatures, no verdict and no fit.
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
    """The model that bundles are cut from, its numbers and its whole as a submodel."""

    model: nn.Module
    numbers: GlobalModel
    full: Submodel


def export_bundle(request: Request, report: Report = silent) -> Exported:
    """Export one submodel as a bundle folder; `report` hears of each stage.

    Raises InputError, ExportError or VerificationError; nothing is left half-written.
    """
    check_places(request)
    origin = load_origin(request, report)
    exported = export_from(origin, request, report)
    save_weights(origin, request)
    return exported


def load_origin(request: Request, report: Report) -> Origin:
    """The model that `request` names. Raises ModelError or InputError."""
    report("loading the model")
    model, numbers = load_global(request.model, request.weights, request.seed)
    return Origin(model, numbers, split(model, "full", request.sample_shape, request.training))


def save_weights(origin: Origin, request: Request) -> None:
    """Write the global model where `request` asks for it. Raises InputError where it cannot be."""
    if request.save_weights is None or request.dry_run:
        return
    try:
        write_file(request.save_weights, origin.numbers.save())
    except OSError as error:
        raise InputError(
            f"The weights cannot be saved as {request.save_weights}: {error.strerror}. What was "
            f"exported is in {request.out}; make room, and export with --force."
        ) from error


def export_from(origin: Origin, request: Request, report: Report) -> Exported:
    """Export the submodel of `request`, cut from `origin`; raises as `export_bundle` does."""
    report(f"splitting {request.spec}")
    submodel = (
        origin.full
        if request.spec == "full"
        else split(origin.model, request.spec, request.sample_shape, request.training)
    )
    inspection = describe(submodel, origin.full)
    if request.dry_run:
        return Exported(request.out, inspection)
    if any(entry.factor is not None for entry in submodel.program.tensors):
        report("factorizing the weights")
    values = submodel.cut(origin.numbers)
    exported = export(
        submodel.program,
        values,
        request.out,
        base=origin.numbers.fingerprint(),
        format=request.format,
        check=request.verify,
        force=request.force,
        report=report,
        cache=request.cache,
    )
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
    """What `signature`, lowered to `graph`, costs for `batch` samples."""
    return SignatureCost(
        name=signature.name,
        operators=graph.operators,
        macs=macs(signature, batch),
        graph_bytes=graph.size,
        peak_bytes=peak_bytes(graph, batch),
    )


def check_places(request: Request) -> None:
    """Raise InputError where the bundle or the weights cannot be written, or not beside each other.

    A bundle's folder is replaced as a whole: weights inside it would be no part of it.
    """
    check_bundle_place(request.out, request.force)
    saved = request.save_weights
    if saved is None:
        return
    bundle, weights_file = request.out.resolve(), saved.resolve()
    if weights_file.is_relative_to(bundle):
        raise InputError(
            f"The weights cannot be saved as {saved}: the bundle {request.out} is a folder of its "
            "own. Give a place outside it."
        )
    if bundle.is_relative_to(weights_file):
        raise InputError(
            f"The bundle cannot be written to {request.out}: the weights are saved as the file "
            f"{saved}. Give another place."
        )
    check_file_place(saved, request.force)


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
            "step": verdict.step,
            "steps": verdict.steps,
            "seed": verdict.seed,
        },
    }
