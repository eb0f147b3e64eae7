"""Lowers a traced signature to ONNX, with operators of the default domain and no external data.

`torch.onnx` does the lowering. This module makes the result small, and removes the paths of this
machine. The same program always gives the same bytes.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import onnx
import onnx_ir as ir
from onnx_ir.passes import Sequential
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    IdentityEliminationPass,
    RemoveUnusedNodesPass,
)
from onnxscript.optimizer import fold_constants
from torch.fx import GraphModule, Node

from exporters.decompositions.activation import GELU, HARD_SIGMOID
from exporters.decompositions.multiply_add import SYMBOLIC_FACTORS
from exporters.decompositions.plain_or_transposed import ONNX_RUNTIME
from exporters.memory.liveness import IN_PLACE, note_in_place
from exporters.memory.onnx_footprint import footprint
from exporters.onnx.large_factors import put_large_factors_first
from exporters.onnx.operator_table import OPSET, missing_translations
from exporters.onnx.recomputed.cheap_activations import RecomputeActivations
from exporters.onnx.recomputed.checkpoints import KeepCheckpoints
from exporters.onnx.scalar_ranks import raise_numbers
from exporters.onnx.state_in_place import update_in_place
from exporters.onnx.torch_translation import (
    finish_scans,
    name_inputs,
    quieten,
    separate_outputs,
    translated,
)
from exporters.onnx.traced_passes.graph_passes import shorten
from exporters.programs import source_lines
from exporters.programs.garbage_collection import rare_collections
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.program import Program, ProgramSignature
from exporters.programs.tracing import Place, TracedGraph, in_double_precision, trace
from exporters.runtime_graph import Graph
from profiles.errors import EdgeTailorError, ExportError
from profiles.progress import Report
from profiles.project_urls import issues_url

IR_VERSION = 10
"""The newest version that onnxruntime 1.19 reads."""

FOLDED_NUMBERS = 1024
"""Limit for the elements of a constant that is computed at export, to keep the file small."""


def compile_graphs(program: Program, report: Report) -> dict[str, Graph]:
    """Lower each signature of `program` to an ONNX file, see `exporters.export.compile_graphs`."""
    graphs = {}
    for signature in program.signatures:
        report(f"lowering {signature.name}")
        data, traced = lower(signature)
        operators = len(onnx.load_from_string(data).graph.node)
        file, memory = f"{signature.name}.onnx", partial(footprint, data)
        graphs[signature.name] = Graph(
            "onnx", file, data, operators, len(data), memory, traced=traced
        )
    return graphs


def to_onnx(signature: ProgramSignature) -> bytes:
    """Lower one signature to a serialized ONNX model.

    Args:
        signature: The signature. Its ports become the inputs and outputs of the model, in order.

    Returns:
        The content of the model's file. The same signature always gives the same content.

    Raises:
        ExportError: An operator cannot be expressed in ONNX.
    """
    return lower(signature)[0]


@rare_collections()
def lower(signature: ProgramSignature) -> tuple[bytes, TracedGraph]:
    """Return the ONNX file of a signature and the traced graph. Raises ExportError as `to_onnx`."""
    try:
        return written(signature)
    except EdgeTailorError:
        raise
    except Exception as error:  # torch and onnx raise errors of many types
        raise_if_interrupted(error)
        reason = source_lines.first_line(error)
        raise ExportError(
            "Signature {signature!r} has no ONNX form: {reason}",
            code="export.no-onnx-form",
            signature=signature.name,
            reason=reason,
        ) from error


def written(signature: ProgramSignature) -> tuple[bytes, TracedGraph]:
    """Lower `signature` like `lower`, but let errors of torch and onnx reach the caller."""
    quieten()
    forms = {**missing_translations(), **ONNX_RUNTIME, **HARD_SIGMOID, **GELU, **SYMBOLIC_FACTORS}
    graph = shorten(trace(signature, forms))
    leave_names_to_ports(graph, signature)
    traced = in_double_precision(graph)
    lowered = translated(graph, signature)
    forget_origins(lowered.model.graph)
    fold_constants(lowered.model, output_size_limit=FOLDED_NUMBERS)
    # Subexpressions count as common only if they read the same values. So identities and
    # duplicates of constants are removed first.
    Sequential(
        IdentityEliminationPass(),
        DeduplicateInitializersPass(),
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        # These come after the elimination of common subexpressions, which would undo the copies.
        *([KeepCheckpoints(signature, again)] if (again := signature.recompute) else []),
        *(RecomputeActivations(p.name) for p in signature.outputs if p.kind == "metric"),
    )(lowered.model)
    put_large_factors_first(lowered.model.graph)
    raise_numbers(lowered.model.graph)
    RemoveUnusedNodesPass()(lowered.model)
    finish_scans(lowered.model)
    name_inputs(lowered.model.graph, [port.name for port in signature.inputs])
    separate_outputs(lowered.model.graph, [port.name for port in signature.outputs])
    overwritten = update_in_place(lowered.model, signature)
    model = lowered.model_proto
    data = finish(model, signature, overwritten)
    return data, TracedGraph(traced, places_of(traced, model, signature), forms)


def leave_names_to_ports(graph: GraphModule, signature: ProgramSignature) -> None:
    """Rename operators of `graph` that have the name of a port, such as a buffer called `mean`.

    ONNX would give another name to such a value, and verification finds values by their names.
    """
    taken = {port.name for port in (*signature.inputs, *signature.outputs)}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.name in taken:
            node._rename(f"{node.name}_result")
    graph.recompile()


def forget_origins(graph: ir.Graph) -> None:
    """Remove torch.onnx's notes on where each node of `graph` comes from.

    The file does not contain these notes, but each copy of the graph would.
    """
    for node in graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()


def finish(
    model: onnx.ModelProto, signature: ProgramSignature, overwritten: Sequence[str] = ()
) -> bytes:
    """Remove metadata, check the model and serialize it.

    The only metadata that stays is `overwritten`: the names of the outputs that can be written over
    old state. The model has only operators of the default domain, and the ports of the signature.
    """
    del model.metadata_props[:]
    for graph in graphs_of(model.graph):
        strip(graph)
    # The bytes of the file must depend only on the program, not on the version of torch.
    model.graph.name = signature.name
    note_in_place(model, overwritten)
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "edgetailor", ""
    del model.functions[:]
    nodes = (node for graph in graphs_of(model.graph) for node in graph.node)
    foreign = sorted({node.domain or "" for node in nodes} - {""})
    if foreign:
        raise ExportError(
            "Signature {signature!r} needs operators of the domains {domains}, but only ONNX's "
            "default domain is allowed. Use other layers.",
            code="export.foreign-operators",
            signature=signature.name,
            domains=foreign,
        )
    del model.opset_import[:]
    model.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    onnx.checker.check_model(model, full_check=True)
    check_ports(model, signature)
    return model.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield `graph` and the bodies of its loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs_of(attribute.g)


def strip(graph: onnx.GraphProto) -> None:
    """Remove the metadata of `graph`, but not the shapes that ONNX Runtime needs to save memory.

    ONNX Runtime lets an operator overwrite its input only if it knows that input and output have
    the same size. The runtime's own shape inference stops at computed shapes. So this function
    keeps the shapes of inputs and outputs of operators that can overwrite an input.
    """
    for holder in (graph, *graph.node, *graph.initializer):
        del holder.metadata_props[:]
        holder.doc_string = ""
    for value in (*graph.input, *graph.output):
        del value.metadata_props[:]
    compared = {
        name
        for node in graph.node
        if node.op_type in IN_PLACE
        for name in (node.input[0], node.output[0])
    }
    known = [value for value in graph.value_info if value.name in compared]
    for value in known:
        del value.metadata_props[:]
    del graph.value_info[:]
    graph.value_info.extend(known)


def check_ports(model: onnx.ModelProto, signature: ProgramSignature) -> None:
    """Raise ExportError unless the model's inputs and outputs are the signature's, in order."""
    for kind, ports, values in (
        ("inputs", signature.inputs, model.graph.input),
        ("outputs", signature.outputs, model.graph.output),
    ):
        if [value.name for value in values] != [port.name for port in ports]:
            raise ExportError(
                "Signature {signature!r}: the {kind} of the ONNX graph differ from those of the "
                "traced program. Please report this at {issues_url}.",
                code="export.wrong-ports",
                signature=signature.name,
                kind=kind,
                issues_url=issues_url(),
            )


def places_of(
    module: GraphModule, model: onnx.ModelProto, signature: ProgramSignature
) -> dict[str, Place]:
    """Map the name of each node of the traced graph `module` to its value in `model`.

    torch.onnx gives a value the name of its node. An output has the name of its port instead.
    """
    written = {name for node in model.graph.node for name in node.output}
    places = {node.name: Place(node.name) for node in module.graph.nodes if node.name in written}
    results = cast(list[Node], module.graph.output_node().args[0])
    for node, port in zip(results, signature.outputs, strict=True):
        if isinstance(node, Node) and node.op == "call_function":
            places[node.name] = Place(port.name)
    return places
