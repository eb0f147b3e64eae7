"""Finishes loops over time: the `Scan` operators that torch.onnx makes of PyTorch's `scan`."""

from collections.abc import Sequence

import onnx_ir

from exporters.programs.loop_bodies import BACKWARD


def finish_scans(model: onnx_ir.Model) -> None:
    """Set directions and separate outputs of the `Scan` operators of `model`.

    Afterwards the loops that `to_scans` marked run from the last step to the first. No value is two
    outputs of a body, because onnxruntime would give both one place in memory.
    """
    for node in model.graph:
        if node.op_type == "Scan":
            body = node.attributes["body"].as_graph()
            set_direction(node, backward=str(body.name).startswith(BACKWARD))
            separate_outputs(body, [f"{v.name}_{n}" for n, v in enumerate(body.outputs)])


def set_direction(scan: onnx_ir.Node, backward: bool) -> None:
    """Set the direction of everything that `scan` reads and writes."""
    inputs = scan.attributes["num_scan_inputs"].as_int()
    outputs = len(scan.outputs) - (len(scan.inputs) - inputs)
    for kind, count in (("input", inputs), ("output", outputs)):
        name = f"scan_{kind}_directions"
        scan.attributes[name] = onnx_ir.AttrInt64s(name, [int(backward)] * count)


def separate_outputs(graph: onnx_ir.Graph, names: Sequence[str]) -> None:
    """Give the outputs of `graph` these `names`; a value that is an output twice is copied."""
    for index, (value, name) in enumerate(zip(tuple(graph.outputs), names, strict=True)):
        if value in graph.outputs[:index]:
            node = onnx_ir.Node("", "Identity", [value])
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        graph.outputs[index].name = name
