"""Translates a traced graph with torch.onnx, without tracing it again.

`torch.export` would run the whole graph again, to find the shape of each value and whether this
shape depends on the batch size. The traced graph already stores both.
"""

import logging
import re
import warnings
from collections.abc import Sequence
from typing import cast

import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule, Node
from torch.onnx import OnnxExporterError, ONNXProgram
from torch.utils._pytree import tree_structure
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from exporters.onnx.operator_table import OPSET, TRANSLATIONS
from exporters.onnx.translation_shortcuts import shortcuts
from exporters.programs import source_lines
from exporters.programs.loop_bodies import BACKWARD, to_scans
from exporters.programs.operator_support import may_lack_form, suggest_alternative
from exporters.programs.program import ProgramSignature
from exporters.programs.recorded_graph import MINIMUM_BATCH, attribute
from exporters.programs.tracing import operators
from profiles.errors import ExportError


def translated(graph: GraphModule, signature: ProgramSignature) -> ONNXProgram:
    """Translate the traced `graph` of `signature`. Changes `graph`.

    torch.onnx's optimizer does not run, because it takes longer than all other work. Raises
    ExportError if an operator has no ONNX form.
    """
    try:
        with warnings.catch_warnings(), shortcuts():
            warnings.simplefilter("ignore")
            lowered = torch.onnx.export(
                exported(graph),
                (),
                dynamo=True,
                input_names=[port.name for port in signature.inputs],
                output_names=[port.name for port in signature.outputs],
                opset_version=OPSET,
                optimize=False,
                custom_translation_table=TRANSLATIONS,
                verbose=False,
            )
    except OnnxExporterError as error:
        raise no_form(signature, str(error.__cause__ or error)) from error
    assert lowered is not None
    return lowered


def no_form(signature: ProgramSignature, reason: str) -> ExportError:
    """Make the error for a signature that torch.onnx refuses. `reason` may name the operator."""
    named = re.search(r"target=torch\.ops\.\w+\.(\w+)", reason)
    if named is None:
        first = reason.strip().splitlines()[0]
        return ExportError(
            "Signature {signature!r} has no ONNX form: {reason}",
            code="export.no-onnx-form",
            signature=signature.name,
            reason=first,
        )
    name = f"aten::{named[1]}"
    place = source_lines.place_of_operator(signature.source, name)
    if not place and signature.source is not None:
        # PyTorch's own form may have operators with other names than those of the model.
        name = next(filter(may_lack_form, operators(signature.source)), name)
        place = source_lines.place_of_operator(signature.source, name)
    return ExportError(
        "Signature {signature!r} needs the operator {operator}{place}, which has no ONNX form: "
        "{alternative}",
        code="export.unsupported-operator",
        signature=signature.name,
        operator=name,
        place=place,
        alternative=suggest_alternative(name),
    )


def quieten() -> None:
    """Silence the exporter's log messages about optional packages and our operators."""
    own = "torch.onnx._internal.exporter"
    folding = "onnxscript.optimizer._constant_folding"
    for name in (f"{own}._registration", f"{own}._core", "onnx_ir._convenience", folding):
        logging.getLogger(name).setLevel(logging.ERROR)


class Decomposed(ExportedProgram):
    """A program with only core operators. A decomposition would not change it.

    Without this class, torch.onnx would trace the whole graph twice to decompose it.
    """

    def run_decompositions(self, *args: object, **kwargs: object) -> ExportedProgram:
        """Return the program itself."""
        return self


def exported(graph: GraphModule) -> ExportedProgram:
    """Turn a traced graph into an exported program for any batch.

    Args:
        graph: A traced graph from `exporters.programs.tracing.trace`. The graph is changed.

    Returns:
        A program with the inputs and outputs of the graph, in order. Its method for decomposing
        does nothing.
    """
    to_scans(graph)
    inputs = graph.graph.find_nodes(op="placeholder")
    constants = constants_as_inputs(graph, inputs[0])
    outputs = graph.graph.output_node()
    results = tuple(cast(list[Node], outputs.args[0]))
    outputs.args = (results,)
    return Decomposed(
        root=graph,
        graph=graph.graph,
        graph_signature=ExportGraphSignature(
            [
                *(
                    InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
                    for name, node in constants.items()
                ),
                *(
                    InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None)
                    for node in inputs
                ),
            ],
            [
                OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None)
                for node in results
            ],
        ),
        state_dict={},
        range_constraints={
            symbol: ValueRanges(MINIMUM_BATCH, int_oo)
            for node in inputs
            for size in node.meta["val"].shape
            if isinstance(size, torch.SymInt)
            for symbol in size.node.expr.free_symbols
        },
        module_call_graph=[
            ModuleCallEntry(
                "",
                ModuleCallSignature(
                    inputs=[],
                    outputs=[],
                    in_spec=tree_structure((tuple(inputs), {})),
                    out_spec=tree_structure(results),
                ),
            )
        ],
        constants={name: attribute(graph, name).detach() for name in constants},
    )


def constants_as_inputs(graph: GraphModule, first: Node) -> dict[str, Node]:
    """Turn the tensors in `graph` into inputs before the input `first`. Return them by name."""
    bodies = dict(graph.named_children())
    mode = first.meta["val"].fake_mode
    lifted: dict[str, Node] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in bodies:
            continue
        if name not in lifted:
            with graph.graph.inserting_before(first):
                lifted[name] = graph.graph.placeholder(name.replace(".", "_"))
            lifted[name].meta["val"] = mode.from_tensor(attribute(graph, name), static_shapes=True)
        node.replace_all_uses_with(lifted[name])
        graph.graph.erase_node(node)
    return lifted


def finish_scans(model: ir.Model) -> None:
    """Set the direction of each loop (`Scan`) of `model`, and make its body's outputs distinct.

    The loops that `to_scans` marked then run from the last step to the first. If the outputs were
    not distinct, onnxruntime would give equal outputs the same memory.
    """
    for node in model.graph:
        if node.op_type == "Scan":
            body = node.attributes["body"].as_graph()
            set_direction(node, backward=str(body.name).startswith(BACKWARD))
            separate_outputs(body, [f"{v.name}_{n}" for n, v in enumerate(body.outputs)])


def set_direction(scan: ir.Node, backward: bool) -> None:
    """If `backward` is set, let `scan` run from its sequences' last step, else from the first."""
    inputs = scan.attributes["num_scan_inputs"].as_int()
    outputs = len(scan.outputs) - (len(scan.inputs) - inputs)
    for kind, count in (("input", inputs), ("output", outputs)):
        name = f"scan_{kind}_directions"
        scan.attributes[name] = ir.AttrInt64s(name, [int(backward)] * count)


def name_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Give the inputs of `graph` these `names`. An input that is also an output is copied."""
    for index, value in enumerate(tuple(graph.outputs)):
        if value in graph.inputs:
            node = ir.Node("", "Identity", [value])
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    for value, name in zip(graph.inputs, names, strict=True):
        value.name = name


def separate_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Give the outputs of `graph` these `names`. A value that is an output twice is copied."""
    for index, (value, name) in enumerate(zip(tuple(graph.outputs), names, strict=True)):
        if value in graph.outputs[:index]:
            node = ir.Node("", "Identity", [value])
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        graph.outputs[index].name = name
