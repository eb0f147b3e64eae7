"""The exporters' front door: a program in, a bundle folder out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from device_agent.formats.atomic_files import write_folder
from device_agent.formats.bundle_place import check_bundle_place
from exporters.bundle_writer import bundle_files
from exporters.embedded_weights import with_constants
from exporters.onnx import onnx_writer
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.program import Program, Report, silent
from exporters.programs.source_lines import first_line
from exporters.runtime_graph import Graph, Graphs
from exporters.verification import Verdict, verify
from profiles.errors import EdgeTailorError, ExportError, InputError, VerificationError

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
        from exporters.tflite import tflite_writer
    except ImportError as error:
        raise ExportError(
            f"TFLite graphs cannot be written here: {error}. Install what it takes with "
            "`pip install 'edgetailor[tflite]'`, or export with --format onnx."
        ) from error
    try:
        return tflite_writer.compile_graphs(program, report)
    except EdgeTailorError:
        raise
    except Exception as error:  # a form may meet what it was not written for
        raise_if_interrupted(error)
        raise ExportError(
            f"The model has no TFLite form: {first_line(error)}. Export it with --format onnx."
        ) from error


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
    check_bundle_place(out, force)
    kept = out.with_name(f"{out.name}.failed-verification")
    if check:
        check_bundle_place(kept, force=True)
    graphs = with_constants(program, compile_graphs(program, report, format), values)
    files = bundle_files(program, graphs, values, base)
    verdict = None
    if check:
        report("verifying against PyTorch")
        verdict = verify(program, graphs, values)
        if not verdict.passed:
            write_bundle(kept, files, force=True)
            raise VerificationError(f"{verdict}. The bundle is kept as {kept}; do not deploy it.")
    write_bundle(out, files, force)
    return ExportedBundle(out, verdict, graphs)


def write_bundle(out: Path, files: Mapping[str, bytes], force: bool) -> None:
    """`write_folder`; raises InputError where the disk does not take the files."""
    try:
        write_folder(out, files, force)
    except OSError as error:
        raise InputError(
            f"The bundle cannot be written to {out}: {error.strerror}. Nothing of it is left; make "
            "room there, or give another place."
        ) from error
