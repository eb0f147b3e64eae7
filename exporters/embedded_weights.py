"""Turns frozen tensors into constants of the graph that reads them.

When a runtime opens a graph, it arranges constant weights for its kernels. It also computes values
in advance that depend only on constants. If weights are inputs, both are impossible. With constant
weights, the stages of the multi-step forward pass take half the time.

`onnx/weight_constants.py` writes the constants. If a program stores a tensor as 8-bit integers, the
constants in the graph are also integers.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import onnx
from torch import Tensor

from device_agent.formats.manifest import Port
from exporters.graph_figures import figures_of
from exporters.memory.onnx_footprint import footprint
from exporters.onnx.weight_constants import hold_weights
from exporters.programs.program import Program
from exporters.runtime_graph import Graph, Graphs


def with_constants(
    program: Program, graphs: Graphs, values: Mapping[str, Tensor]
) -> dict[str, Graph]:
    """Embed each frozen tensor that only one signature reads.

    If several signatures read a tensor, it stays in the weights file, so that it is not sent twice.
    TFLite graphs share one file, and all their inputs stay inputs.

    Args:
        program: The program of a submodel.
        graphs: The graph of every signature. This function does not change the graphs.
        values: Every stored tensor of the program, by name.

    Returns:
        The graphs to deploy, by signature name.
    """
    alone = read_alone(program)
    deployed = dict(graphs)
    for name, graph in graphs.items():
        if graph.runtime == "onnx" and alone[name]:
            held = holding(graph, {p.name: values[str(p.state)] for p in alone[name]}, program.int8)
            deployed[name] = replace(held, figures=figures_of(held, program.batch_of(name)))
    return deployed


def read_alone(program: Program) -> dict[str, list[Port]]:
    """Map each signature's name to its frozen inputs that no other signature reads.

    If a program only predicts, there is no weights file, so each graph contains all tensors that it
    reads.
    """
    predicts = program.output is not None
    frozen = {entry.name for entry in program.tensors if entry.role == "frozen" and entry.stored}
    readers = Counter(port.state for s in program.signatures for port in s.inputs)
    return {
        s.name: [p for p in s.inputs if p.state in frozen and (predicts or readers[p.state] == 1)]
        for s in program.signatures
    }


def holding(graph: Graph, tensors: Mapping[str, Tensor], int8: Collection[str]) -> Graph:
    """Return the ONNX `graph` with `tensors` as constants; see `hold_weights`."""
    model = onnx.load_from_string(graph.data)
    dropped = hold_weights(model, tensors, int8)
    data = model.SerializeToString(deterministic=True)
    return replace(
        graph,
        data=data,
        size=len(data),
        footprint=partial(footprint, data),
        figures=None,
        held=frozenset(tensors),
        dropped=frozenset(dropped),
    )
