"""Loops over time as ONNX has them: operators `Scan`, whose bodies are the steps traced."""

from collections.abc import Sequence
from typing import Any

import onnx_ir
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from exporters.decompositions import table
from exporters.loops import STEPS, Step, loop

BACKWARD = "from_the_last"
"""What the names of bodies begin with whose loops go from the last step to the first."""


def to_scans(program: ExportedProgram) -> ExportedProgram:
    """`program` with each `edgetailor::loop` as PyTorch's `scan`, which torch.onnx makes a Scan of.

    Afterwards: no `edgetailor::loop`, and no loop computes an output that nothing reads. PyTorch's
    scan goes from the first step to the last only; `finish_scans` makes that good.
    """
    module = program.graph_module
    module.graph.eliminate_dead_code()
    for number, node in enumerate(module.graph.find_nodes(op="call_function", target=loop)):
        *_, reverse = node.args
        replace(module, node, f"{BACKWARD if reverse else 'step'}_{number}")
    module.recompile()
    return program


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


def replace(module: GraphModule, node: Node, name: str) -> None:
    """Put a scan in the place of the loop `node`, with its body as the submodule `name`."""
    arguments: Any = node.args
    step_name, states, inputs, constants, _ = arguments
    step = STEPS[step_name]
    users: list[tuple[Node, Any]] = [(user, user.args[1]) for user in node.users]
    kept = sorted({*range(step.states), *(place for _, place in users)})
    values = [
        *(state.meta["val"] for state in states),
        *(x.meta["val"][0] for x in inputs),
        *(constant.meta["val"] for constant in constants),
    ]
    setattr(module, name, body(step, values, kept))
    graph = module.graph
    with graph.inserting_before(node):
        submodule = graph.get_attr(name)
        scan = graph.call_function(
            torch.ops.higher_order.scan, (submodule, states, inputs, constants)
        )
    scan.meta = {**node.meta, "val": [node.meta["val"][place] for place in kept]}
    for user, place in users:
        user.args = (scan, kept.index(place))
    graph.erase_node(node)


def body(step: Step, values: list[FakeTensor], kept: list[int]) -> GraphModule:
    """`step` as a graph from tensors like `values` to those of its results that are `kept`."""
    mode = values[0].fake_mode

    def chosen(*arguments: Tensor) -> list[Tensor]:
        results = step.function(*arguments)
        return [results[place] for place in kept]

    with mode:
        graph = make_fx(chosen, decomposition_table=table())(*values)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
