"""Loops over time as ONNX has them: operators `Scan`, made by torch.onnx of PyTorch's `scan`."""

from collections.abc import Sequence

import onnx_ir

from exporters.programs.loop_bodies import BACKWARD


def finish_scans(model: onnx_ir.Model) -> None:
    """Make the operators `Scan` of `model` what runtimes need.

    Afterwards: those that `to_scans` marked go from the last step to the first, and no value is two
    outputs of a body, which onnxruntime would give one place in memory.
    """
    for node in model.graph:
        if node.op_type == "Scan":
            body = node.attributes["body"].as_graph()
            set_direction(node, backward=str(body.name).startswith(BACKWARD))
            separate_outputs(body, [f"{v.name}_{n}" for n, v in enumerate(body.outputs)])


def set_direction(scan: onnx_ir.Node, backward: bool) -> None:
    """Let all that `scan` reads and writes go one way."""
    inputs = scan.attributes["num_scan_inputs"].as_int()
    outputs = len(scan.outputs) - (len(scan.inputs) - inputs)
    for kind, count in (("input", inputs), ("output", outputs)):
        name = f"scan_{kind}_directions"
        scan.attributes[name] = onnx_ir.AttrInt64s(name, [int(backward)] * count)


def separate_outputs(graph: onnx_ir.Graph, names: Sequence[str]) -> None:
    """Give the outputs of `graph` these `names`, with a copy where one is an output already."""
    for place, (value, name) in enumerate(zip(tuple(graph.outputs), names, strict=True)):
        if value in graph.outputs[:place]:
            node = onnx_ir.Node("", "Identity", [value])
            graph.append(node)
            graph.outputs[place] = node.outputs[0]
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        graph.outputs[place].name = name
