"""Exports a program as a bundle folder: lower, verify, write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from device_agent.formats.atomic_files import write_folder
from device_agent.formats.bundle_place import check_bundle_place
from exporters.bundle_writer import bundle_files
from exporters.embedded_weights import read_alone, with_constants
from exporters.graph_cache import GraphCache, default_cache
from exporters.graph_figures import figures_of, forms, onnx_figures
from exporters.memory.onnx_footprint import SizedGraph
from exporters.onnx import onnx_writer
from exporters.programs.garbage_collection import rare_collections
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.program import Program, ProgramSignature
from exporters.programs.program_identity import graphs_key
from exporters.programs.source_lines import first_line
from exporters.programs.tracing import TracedGraph
from exporters.runtime_graph import Graph, Graphs
from exporters.verification.verdict import Verdict, worst
from exporters.verification.verify import verify
from profiles.errors import EdgeTailorError, ExportError, InputError, VerificationError
from profiles.progress import Report, silent

Format = Literal["onnx", "tflite"]
VERIFIED = set[bytes]()
"""Operators that this process has verified, so that submodels of one model share the work."""


@dataclass(frozen=True)
class ExportedBundle:
    """A bundle that was written to `out`.

    `export` returns such a bundle. `verdict` shows how far the graphs are from PyTorch.

    Attributes:
        out: The bundle's folder.
        verdict: The result of the verification; None if the bundle was not verified.
        graphs: The graph of each signature, by signature name. As in the bundle, some frozen
            tensors are constants of these graphs.
        reused: Names of the signatures whose graphs came from the cache.
        verified_earlier: Whether `verdict` comes only from earlier exports of these graphs.
    """

    out: Path
    verdict: Verdict | None
    graphs: Graphs = field(repr=False)
    reused: frozenset[str] = field(default=frozenset(), repr=False)
    verified_earlier: bool = field(default=False, repr=False)


@dataclass(frozen=True)
class GraphUnit:
    """Signatures that are lowered together because they share files, and their graphs.

    `key` identifies the graphs in the cache; None if the graphs cannot be cached. `reused` tells
    whether `graphs` came from the cache.
    """

    program: Program
    key: str | None
    graphs: Graphs
    reused: bool


def compile_graphs(
    program: Program, report: Report = silent, format: Format = "onnx", *, cache: bool = True
) -> dict[str, Graph]:
    """Trace and lower every signature of a program.

    Args:
        program: The program of a submodel.
        report: Called with the name of each stage.
        format: `onnx` for ONNX Runtime, `tflite` for LiteRT.
        cache: Whether to take graphs from the cache and to store new graphs in it. The cache is the
            folder `$EDGETAILOR_CACHE`, or else `edgetailor` in the user's cache folder.

    Returns:
        The graphs by signature name.

    Raises:
        ExportError: A signature cannot be lowered (the message names signature and operator). Or
            the writer's library is not installed. Or the program needs 8-bit weights or recomputed
            activations, which the format does not have.

    Examples:
        >>> submodel = split(model, "low-rank:0.25", (3, 32, 32))
        >>> compile_graphs(submodel.program)["train"].file
        'train.onnx'
    """
    units = compile_units(program, report, format, default_cache() if cache else None)
    return {name: graph for unit in units for name, graph in unit.graphs.items()}


def compile_units(
    program: Program, report: Report, file_format: Format, store: GraphCache | None
) -> list[GraphUnit]:
    """Compile the ONNX signatures of `program` one by one, or its TFLite signatures together."""
    if program.int8 and file_format != "onnx":
        raise ExportError(
            "{submodel} has 8-bit weights, which only ONNX graphs support. Export it with --format "
            "onnx, or without frozen=int8.",
            code="export.eight-bit-needs-onnx",
            submodel=program.submodel,
            format=file_format,
        )
    signatures = program.signatures
    chosen = [s.recompute for s in signatures if s.recompute is not None]
    if file_format != "onnx" and any(recompute.most_work is None for recompute in chosen):
        raise ExportError(
            "{submodel} computes activations again to save memory, which only ONNX graphs support. "
            "Export it with --format onnx, or without recompute=yes.",
            code="export.recomputation-needs-onnx",
            submodel=program.submodel,
            format=file_format,
        )
    together = [signatures] if file_format == "tflite" else [(s,) for s in signatures]
    return [compile_unit(program, part, report, file_format, store) for part in together]


def compile_unit(
    program: Program,
    signatures: tuple[ProgramSignature, ...],
    report: Report,
    file_format: Format,
    store: GraphCache | None,
) -> GraphUnit:
    """Return the graphs of `signatures`, from the cache if possible."""
    part = replace(program, signatures=signatures)
    key = None if store is None else graphs_key(program, signatures, file_format)
    if store is None or key is None:
        return GraphUnit(part, None, lower(part, report, file_format), reused=False)
    known = store.load(key)
    if known is not None:
        return GraphUnit(part, key, known, reused=True)
    graphs = lower(part, report, file_format)
    store.store(key, graphs)
    return GraphUnit(part, key, graphs, reused=False)


def lower(
    program: Program,
    report: Report,
    file_format: Format,
    values: Mapping[str, Tensor] | None = None,
) -> dict[str, Graph]:
    """Lower every signature of `program` without the cache. Raises like `compile_graphs`.

    If `values` are given, each signature has a separate TFLite file, which contains these tensors.
    """
    if file_format == "onnx":
        return onnx_writer.compile_graphs(program, report)
    try:  # the writer needs packages of the extra `tflite`
        from exporters.tflite import tflite_writer
    except ImportError as error:
        raise ExportError(
            "TFLite graphs cannot be written here: {reason}. Install the writer with `pip install "
            "'edgetailor[tflite]'`, or export with --format onnx.",
            code="export.tflite-not-installed",
            reason=str(error),
        ) from error
    try:
        if values is not None:
            return tflite_writer.inference_graphs(program, values, report)
        return tflite_writer.compile_graphs(program, report)
    except EdgeTailorError:
        raise
    except Exception as error:  # a lowering rule may meet an operand that it was not written for
        raise_if_interrupted(error)
        raise ExportError(
            "The model cannot be written as a TFLite graph: {reason}. Export it with --format "
            "onnx.",
            code="export.no-tflite-form",
            reason=first_line(error),
        ) from error


def export(
    program: Program,
    values: Mapping[str, Tensor],
    out: str | Path,
    *,
    base: str,
    format: Format = "onnx",
    check: bool | None = None,
    force: bool = False,
    report: Report = silent,
    cache: bool = True,
) -> ExportedBundle:
    """Write a program with its weights as a bundle to a new folder.

    Args:
        program: The program of a submodel.
        values: Every stored tensor of the program, by name.
        out: The bundle's folder. It must not exist unless `force` is given.
        base: Fingerprint of the global model that `values` were cut from.
        format: `onnx` for ONNX Runtime, `tflite` for LiteRT.
        check: Whether to compare every signature with PyTorch on new random inputs before writing.
            By default, two things are not compared again: graphs from the cache that passed in an
            earlier export, and operators that passed in an earlier export of this process.
        force: Whether to replace a bundle at `out`.
        report: Called with the name of each stage.
        cache: Whether to use the cache of graphs; see `compile_graphs`.

    Returns:
        The bundle, the result of the verification, and the names of the reused graphs.

    Raises:
        ExportError: A signature cannot be lowered, or the format cannot represent it.
        VerificationError: Graph and PyTorch disagree. The bundle is stored as
            `OUT.failed-verification`. After any other error, no file is left.
        InputError: The bundle cannot be written to `out`.

    Examples:
        >>> submodel = split(model, "full", (3, 32, 32))
        >>> base = GlobalModel(model.state_dict())
        >>> export(submodel.program, submodel.cut(base), "bundle", base=base.fingerprint())
    """
    out = Path(out)
    check_places(out, check=check, force=force)
    compiled = verified_graphs(
        program, values, out, base=base, format=format, check=check, report=report, cache=cache
    )
    write_bundle(out, bundle_files(program, compiled.graphs, values, base), force)
    return ExportedBundle(
        out,
        compiled.verdict,
        compiled.graphs,
        reused=compiled.reused,
        verified_earlier=compiled.verified_earlier,
    )


def check_places(out: Path, *, check: bool | None = None, force: bool = False) -> None:
    """Raise InputError unless a bundle can be written to `out` and, if checked, to `failed_place`.

    Callers check this before they lower the graphs, which can take minutes.
    """
    check_bundle_place(out, force)
    if check is not False:
        check_bundle_place(failed_place(out), force=True)


def failed_place(out: Path) -> Path:
    """The folder of a bundle that was meant for `out` but failed verification."""
    return out.with_name(f"{out.name}.failed-verification")


@dataclass(frozen=True)
class VerifiedGraphs:
    """The graphs of a program, ready for a bundle; see `ExportedBundle` for the attributes."""

    graphs: Graphs
    verdict: Verdict | None
    reused: frozenset[str]
    verified_earlier: bool


def verified_graphs(
    program: Program,
    values: Mapping[str, Tensor],
    out: Path,
    *,
    base: str,
    format: Format,
    check: bool | None = None,
    report: Report = silent,
    cache: bool = True,
) -> VerifiedGraphs:
    """Compile a program and compare its graphs with PyTorch. `export` describes the arguments.

    Nothing is written to `out`. If graph and PyTorch disagree, the bundle is stored beside `out`.

    Raises:
        ExportError: A signature cannot be lowered, or the format cannot represent it.
        VerificationError: Graph and PyTorch disagree.
    """
    store = default_cache() if cache else None
    if program.output is None or format == "onnx":
        units = compile_units(program, report, format, store)
    else:  # the graph holds the weights, so no other export can reuse it
        units = [GraphUnit(program, None, lower(program, report, format, values), reused=False)]
    compiled = {name: graph for unit in units for name, graph in unit.graphs.items()}
    graphs = with_constants(program, with_forms(program, compiled, store), values)
    earlier = [None if check else earlier_verdict(unit, store) for unit in units]
    verdicts = [verdict for verdict in earlier if verdict is not None]
    fresh = [unit for unit, verdict in zip(units, earlier, strict=True) if verdict is None]
    if check is not False and fresh:
        report("verifying against PyTorch")
        known = set[bytes]() if check else VERIFIED
        new_verdicts = verify_units(fresh, graphs, values, format, known)
        verdict = worst(new_verdicts)
        if not verdict.passed:
            kept = failed_place(out)
            write_bundle(kept, bundle_files(program, graphs, values, base), force=True)
            raise VerificationError(
                "{verdict}. The bundle is kept as {kept}; do not deploy it.",
                code="verification.failed",
                error=verdict.error,
                tolerance=verdict.tolerance,
                signature=verdict.signature,
                output=verdict.output,
                operator=verdict.operator,
                step=verdict.step,
                seed=verdict.seed,
                kept=str(kept),
                verdict=str(verdict),
            )
        keep_verdicts(fresh, new_verdicts, store)
        verdicts += new_verdicts
    return VerifiedGraphs(
        graphs,
        worst(verdicts) if verdicts and check is not False else None,
        reused=frozenset(name for unit in units if unit.reused for name in unit.graphs),
        verified_earlier=check is not False and not fresh,
    )


@rare_collections()
def with_forms(
    program: Program, graphs: Graphs, store: GraphCache | None = None
) -> dict[str, Graph]:
    """Add to each ONNX graph its other forms (blocked layouts, Winograd's method) and its figures.

    If a graph will contain weights as constants, it gets no other forms, so that no weight is sent
    twice. `with_constants` computes the figures of such a graph.

    Args:
        program: The program of a submodel.
        graphs: The graphs of the program's signatures, as `compile_graphs` returns them.
        store: The cache, from which forms and figures are read and in which new ones are stored.
    """
    constants = read_alone(program)
    return {
        name: graph
        if graph.runtime == "onnx" and constants[name]
        else completed(graph, program.batch_of(name), store)
        for name, graph in graphs.items()
    }


def completed(graph: Graph, batch: int, store: GraphCache | None) -> Graph:
    """Return `graph` with its other forms and its figures for `batch` samples."""
    if graph.runtime != "onnx":
        return replace(graph, figures=figures_of(graph, batch))
    known = None if store is None else store.with_figures(graph, batch)
    if known is not None:
        return known
    sized = SizedGraph(graph.data, batch)
    complete = replace(graph, forms=dict(forms(sized)), figures=onnx_figures(sized))
    if store is not None:
        store.keep_figures(complete)
    return complete


def earlier_verdict(unit: GraphUnit, store: GraphCache | None) -> Verdict | None:
    """Return the stored verdict on the graphs of `unit`, or None if there is none."""
    if store is None or unit.key is None or not unit.reused:
        return None
    return store.verdict(unit.key, unit.graphs)


def keep_verdicts(
    units: Sequence[GraphUnit], verdicts: Sequence[Verdict], store: GraphCache | None
) -> None:
    """Store the verdict of each unit in `units`. `verdicts` has the order of `units`."""
    for unit, verdict in zip(units, verdicts, strict=True):
        if store is not None and unit.key is not None:
            store.keep_verdict(unit.key, unit.graphs, verdict)


def verify_units(
    units: Sequence[GraphUnit],
    graphs: Graphs,
    values: Mapping[str, Tensor],
    file_format: Format,
    known: set[bytes],
) -> list[Verdict]:
    """Verify each unit in `units` and return the verdicts.

    Args:
        units: The units.
        graphs: The graphs of all units, with the bundle's constants.
        values: Every stored tensor of the program, by name.
        file_format: The format of the graphs.
        known: See `compared` of `verify`.
    """
    trace = partial(traced, file_format)
    return [verify(u.program, graphs, values, trace, compared=known) for u in units]


def traced(file_format: Format, signature: ProgramSignature) -> TracedGraph:
    """Trace a signature again if its graph came from the cache."""
    if file_format == "onnx":
        return onnx_writer.lower(signature)[1]
    from exporters.tflite import tflite_writer

    return tflite_writer.to_subgraph(signature)[1]


def write_bundle(out: Path, files: Mapping[str, bytes], force: bool) -> None:
    """Write the files of a bundle to `out`. Raises InputError if the disk refuses them."""
    try:
        write_folder(out, files, force)
    except OSError as error:
        raise InputError(
            "The bundle cannot be written to {path}: {reason}. No part of the bundle was kept. "
            "Free space there, or choose another path.",
            code="file.not-writable",
            path=str(out),
            reason=error.strerror,
        ) from error
