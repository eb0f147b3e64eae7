"""The exporters' front door: a program in, a bundle folder out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from device_agent.files import refuse_existing, write_folder
from exporters.bundle_writer import Graphs, bundle_files
from exporters.onnx_writer import to_onnx
from exporters.program import Program
from exporters.verify import Verdict, verify
from profiles.errors import VerificationError

Report = Callable[[str], None]


@dataclass(frozen=True)
class ExportedBundle:
    """A bundle that was written to `out`; `verdict` is None where it was not checked."""

    out: Path
    verdict: Verdict | None
    graphs: Graphs = field(repr=False)


def silent(stage: str) -> None:
    """Report nothing."""


def compile_graphs(program: Program, report: Report = silent) -> dict[str, bytes]:
    """Trace and lower every signature of `program`; `report` hears of each stage.

    Raises ExportError naming signature and operator where one cannot be lowered.
    """
    graphs = {}
    for signature in program.signatures:
        report(f"lowering {signature.name}")
        graphs[signature.name] = to_onnx(signature)
    return graphs


def export(
    program: Program,
    values: Mapping[str, Tensor],
    out: str | Path,
    *,
    base: str,
    check: bool = True,
    force: bool = False,
    report: Report = silent,
) -> ExportedBundle:
    """Write `program` with its weights `values` as a bundle to the new folder `out`.

    With `check` every signature first runs against PyTorch on fresh random inputs; a miss raises
    VerificationError and leaves the bundle under `out` with `.failed-verification` added.
    Nothing is left behind by any other error.
    """
    out = Path(out)
    refuse_existing(out, force)
    graphs = compile_graphs(program, report)
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
