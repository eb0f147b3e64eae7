"""Loops over time as ONNX has them: operators `Scan`, whose bodies are the steps traced."""

import operator

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from exporters.decompositions import table
from exporters.loops import STEPS, Step, loop


def to_scans(program: ExportedProgram) -> ExportedProgram:
    """`program` with each `edgetailor::loop` as PyTorch's `scan`, which torch.onnx makes a Scan of.

    Afterwards: no `edgetailor::loop`, and no loop computes an output that nothing reads.
    """
    module = program.graph_module
    for number, node in enumerate(module.graph.find_nodes(op="call_function", target=loop)):
        replace(module, node, f"step_{number}")
    module.recompile()
    return program


def replace(module: GraphModule, node: Node, name: str) -> None:
    """Put a scan in the place of the loop `node`, with its body as the submodule `name`."""
    step_name, states, inputs, constants, reverse = node.args
    step = STEPS[step_name]
    users = {int(user.args[1]): user for user in node.users}
    kept = [*range(step.states), *sorted(place for place in users if place >= step.states)]
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
            torch.ops.higher_order.scan,
            (submodule, states, inputs, constants),
        )
    scan.meta = {**node.meta, "val": [node.meta["val"][place] for place in kept]}
    for place, user in users.items():
        user.args = (scan, kept.index(place))
    graph.erase_node(node)


def body(step: Step, values: list[Tensor], kept: list[int]) -> GraphModule:
    """`step` as a graph from tensors like `values` to those of its results that are `kept`."""

    def chosen(*arguments: Tensor) -> list[Tensor]:
        results = step.function(*arguments)
        return [results[place] for place in kept]

    with torch._guards.detect_fake_mode(values):
        graph = make_fx(chosen, decomposition_table=table())(*values)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
