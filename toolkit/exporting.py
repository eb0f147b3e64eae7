"""What `edgetailor export` does: load, split, export, and say what came out."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import onnx

from device_agent.files import check_file_place, fingerprint, refuse_existing, write_file
from device_agent.manifest import MANIFEST
from exporters import export
from exporters.export import Report, silent
from exporters.verify import Verdict
from profiles.errors import InputError
from toolkit.approximation import Fit, fit
from toolkit.inspection import Inspection, describe
from toolkit.loading import load_global
from toolkit.splitting import split
from toolkit.training import TrainingConfig

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
    training: TrainingConfig = field(default_factory=TrainingConfig)
    save_weights: Path | None = None
    verify: bool = True
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Exported:
    """One exported bundle; `signatures` gives operators and graph bytes by signature.

    A dry run has no bundle hash, no signatures, no verdict and no fit.
    """

    out: Path
    inspection: Inspection
    bundle_sha256: str | None
    signatures: dict[str, tuple[int, int]]
    verdict: Verdict | None
    fit: Fit | None = None


def export_bundle(request: Request, report: Report = silent) -> Exported:
    """Export one submodel as a bundle folder; `report` hears of each stage.

    Raises InputError, ExportError or VerificationError; nothing is left half-written.
    """
    check_places(request)
    report("loading the model")
    model, source = load_global(request.model, request.weights, request.seed)
    report(f"splitting {request.spec}")
    full = split(model, "full", request.sample_shape, request.training)
    submodel = split(model, request.spec, request.sample_shape, request.training)
    inspection = describe(submodel, full)
    if request.dry_run:
        return Exported(request.out, inspection, None, {}, None)
    if any(entry.factor is not None for entry in submodel.program.tensors):
        report("factorizing the weights")
    values = submodel.cut(source)
    exported = export(
        submodel.program,
        values,
        request.out,
        base=source.fingerprint(),
        check=request.verify,
        force=request.force,
        report=report,
    )
    if request.save_weights is not None:
        write_file(request.save_weights, source.save())
    return Exported(
        out=request.out,
        inspection=inspection,
        bundle_sha256=fingerprint((request.out / MANIFEST).read_bytes()).sha256,
        signatures={
            name: (len(onnx.load_from_string(graph).graph.node), len(graph))
            for name, graph in exported.graphs.items()
        },
        verdict=exported.verdict,
        fit=fit(submodel, values, source),
    )


def check_places(request: Request) -> None:
    """Raise InputError where the bundle or the weights cannot be written, or not beside each other.

    A bundle's folder is replaced as a whole: weights inside it would be no part of it.
    """
    refuse_existing(request.out, request.force)
    # A folder needs the same of its parents as a file does.
    if not request.out.exists():
        check_file_place(request.out)
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
        "signatures": [
            {"name": name, "operators": operators, "graph_bytes": size}
            for name, (operators, size) in exported.signatures.items()
        ],
        "verification": verdict
        and {
            "relative_error": verdict.error,
            "tolerance": verdict.tolerance,
            "signature": verdict.signature,
            "output": verdict.output,
            "seed": verdict.seed,
        },
    }
