"""Lowers traced signatures to one TFLite file with a named signature for each.

The file has only TFLite's own operators, and no Flex operators. This package writes the file
itself, because litert-torch cannot leave the batch size open. Weights are inputs, as in the ONNX
graphs.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from exporters.memory.tflite_footprint import footprint
from exporters.programs.loop_bodies import to_scans
from exporters.programs.program import Program, ProgramSignature
from exporters.programs.tracing import TracedGraph, in_double_precision, trace
from exporters.runtime_graph import Graph
from exporters.tflite import (
    along_axes,
    constants_and_ranges,
    convolutions_and_pooling,
    elementwise,
    indexing,
    matrix_products,
    selection,
    shape,
    tflite_decompositions,
    unrolled_loops,
)
from exporters.tflite.exposed_values import exposed_values
from exporters.tflite.flatbuffer import Subgraph, serialize, with_parts
from exporters.tflite.lowering import LoweringRules, lower_signature
from exporters.tflite.subgraph_sizes import plan_of
from profiles.progress import Report

FILE = "model.tflite"
DESCRIPTION = "edgetailor"
"""The description that each file contains."""
FORMS: LoweringRules = {
    **elementwise.FORMS,
    **shape.FORMS,
    **along_axes.FORMS,
    **indexing.FORMS,
    **matrix_products.FORMS,
    **convolutions_and_pooling.FORMS,
    **constants_and_ranges.FORMS,
    **selection.FORMS,
    **unrolled_loops.FORMS,
}


def to_subgraph(
    signature: ProgramSignature, held: Mapping[str, Tensor] | None = None
) -> tuple[Subgraph, TracedGraph]:
    """Lower one signature. Return its subgraph and the traced graph.

    The inputs whose names are in `held` become constants of the subgraph.

    Raises ExportError if an operator has no TFLite form.
    """
    forms = tflite_decompositions.FORMS
    graph = trace(signature, forms)
    traced = in_double_precision(graph)
    to_scans(graph, forms)
    subgraph, places = lower_signature(graph, signature, FORMS, held)
    return subgraph, TracedGraph(traced, places, forms, partial(exposed_values, signature.name))


def compile_graphs(program: Program, report: Report) -> dict[str, Graph]:
    """Lower all signatures of `program` to one file; see `exporters.export.compile_graphs`.

    A signature that trains comes first, because only the results of the first signature can be read
    without a copy.
    """
    subgraphs, traced = {}, {}
    signatures = sorted(program.signatures, key=lambda signature: not signature.trains)
    for signature in signatures:
        report(f"lowering {signature.name}")
        subgraphs[signature.name], traced[signature.name] = to_subgraph(signature)
    data = serialize(subgraphs, DESCRIPTION)
    operators = sum(len(part.operators) for part in with_parts(subgraphs.values()))
    graphs = {}
    over = signatures[0].replacing
    for name, own in subgraphs.items():
        plan, over = plan_of(own, operators, over), ()
        graphs[name] = Graph(
            "litert",
            FILE,
            data,
            operators=len(own.operators),
            size=len(serialize({name: own}, DESCRIPTION)),
            footprint=partial(footprint, plan),
            plan=plan,
            traced=traced[name],
        )
    return graphs


def inference_graphs(
    program: Program, values: Mapping[str, Tensor], report: Report
) -> dict[str, Graph]:
    """Lower each signature of `program` to a file with the tensors of `values` that it reads.

    Each stage has its own file, so that only one stage is in memory at a time.
    """
    graphs = {}
    for signature in program.signatures:
        report(f"lowering {signature.name}")
        file = FILE if len(program.signatures) == 1 else f"{signature.name}.tflite"
        graphs[signature.name] = inference_graph(signature, values, file)
    return graphs


def inference_graph(signature: ProgramSignature, values: Mapping[str, Tensor], file: str) -> Graph:
    """Lower `signature` to the file `file`, which also stores the tensors in `values`."""
    held = {port.name: values[port.state] for port in signature.inputs if port.state is not None}
    subgraph, traced = to_subgraph(signature, held)
    data = serialize({signature.name: subgraph}, DESCRIPTION)
    plan = plan_of(subgraph, len(subgraph.operators))
    return Graph(
        "litert",
        file,
        data,
        operators=len(subgraph.operators),
        size=len(data),
        footprint=partial(footprint, plan),
        held=frozenset(held),
        plan=plan,
        traced=traced,
    )


def to_tflite(signatures: Sequence[ProgramSignature]) -> bytes:
    """Write `signatures` as a TFLite file. Inputs and outputs have the names of the ports.

    If an operator has no TFLite form, raises ExportError with the names of signature and operator.
    """
    return serialize({s.name: to_subgraph(s)[0] for s in signatures}, DESCRIPTION)
