"""The exporters' front door: a program in, a bundle folder out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from device_agent.files import refuse_existing, write_folder
from exporters import onnx_writer
from exporters.bundle_writer import Graph, Graphs, bundle_files
from exporters.program import Program, Report, silent
from exporters.verify import Verdict, verify
from profiles.errors import ExportError, VerificationError

Format = Literal["onnx", "tflite"]


@dataclass(frozen=True)
class ExportedBundle:
    """A bundle that was written to `out`; `verdict` is None where it was not checked."""

    out: Path
    verdict: Verdict | None
    graphs: Graphs = field(repr=False)


def compile_graphs(
    program: Program, report: Report = silent, format: Format = "onnx"
) -> dict[str, Graph]:
    """Trace and lower every signature of `program`; `report` hears of each stage.

    Raises ExportError naming signature and operator where one cannot be lowered, or where the
    writer's library is not installed.
    """
    if format == "onnx":
        return onnx_writer.compile_graphs(program, report)
    try:
        from exporters import tflite_writer
    except ImportError as error:
        raise ExportError(
            f"TFLite graphs cannot be written here: {error}. Install what it takes with "
            "`pip install 'edgetailor[tflite]'`, or export with --format onnx."
        ) from error
    return tflite_writer.compile_graphs(program, report)


def export(
    program: Program,
    values: Mapping[str, Tensor],
    out: str | Path,
    *,
    base: str,
    format: Format = "onnx",
    check: bool = True,
    force: bool = False,
    report: Report = silent,
) -> ExportedBundle:
    """Write `program` with its weights `values` as a bundle in `format` to the new folder `out`.

    With `check` every signature first runs against PyTorch on fresh random inputs; a miss raises
    VerificationError and leaves the bundle under `out` with `.failed-verification` added.
    Nothing is left behind by any other error.
    """
    out = Path(out)
    refuse_existing(out, force)
    graphs = compile_graphs(program, report, format)
    files = bundle_files(program, graphs, values, base)
    verdict = None
    if check:
        report("verifying against PyTorch")
        verdict = verify(program, graphs, values)
        if not verdict.passed:
            kept = out.with_name(f"{out.name}.failed-verification")
            write_folder(kept, files, force=True)
            raise VerificationError(f"{verdict}. The bundle is kept as {kept}; do not deploy it.")
    write_folder(out, files, force)
    return ExportedBundle(out, verdict, graphs)
