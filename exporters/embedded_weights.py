"""Frozen tensors as constants of the graph that reads them.

A runtime lays weights out for its kernels, and folds what depends on nothing else, when it opens a
graph: of inputs it knows too little. Stages of the multi-step forward pass take half the time so.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import onnx
from onnx import numpy_helper
from torch import Tensor

from device_agent.formats.manifest import Port
from exporters.memory.onnx_footprint import footprint
from exporters.programs.program import Program
from exporters.runtime_graph import Graph, Graphs


def with_constants(
    program: Program, graphs: Graphs, values: Mapping[str, Tensor]
) -> dict[str, Graph]:
    """`graphs` with the numbers of each frozen tensor that one signature alone reads.

    What several signatures read stays in the weights file, so that no tensor is sent twice. TFLite
    graphs, which share one file, keep their inputs.
    """
    alone = read_alone(program)
    return {
        name: with_initializers(graph, {p.name: values[str(p.state)] for p in alone[name]})
        if graph.runtime == "onnx" and alone[name]
        else graph
        for name, graph in graphs.items()
    }


def read_alone(program: Program) -> dict[str, list[Port]]:
    """For each signature its inputs that are frozen tensors which no other one reads."""
    frozen = {entry.name for entry in program.tensors if entry.role == "frozen" and entry.stored}
    readers = Counter(port.state for s in program.signatures for port in s.inputs)
    return {
        s.name: [p for p in s.inputs if p.state in frozen and readers[p.state] == 1]
        for s in program.signatures
    }


def with_initializers(graph: Graph, tensors: Mapping[str, Tensor]) -> Graph:
    """`graph`, in ONNX, with `tensors` in place of its inputs of those names."""
    model = onnx.load_from_string(graph.data)
    inputs = [value for value in model.graph.input if value.name not in tensors]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(
        numpy_helper.from_array(tensor.detach().contiguous().numpy(), name)
        for name, tensor in tensors.items()
    )
    data = model.SerializeToString(deterministic=True)
    return replace(
        graph,
        data=data,
        size=len(data),
        footprint=partial(footprint, data),
        held=frozenset(tensors),
    )
