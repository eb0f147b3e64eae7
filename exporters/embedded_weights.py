"""Makes frozen tensors constants of the graph that reads them.

When a runtime opens a graph, it lays constant weights out for its kernels and folds everything that
depends on constants alone. It can do neither for inputs. With constants, the stages of the
multi-step forward pass take half the time.

Weights that a program keeps as 8-bit integers are so in the file; see `onnx/int8_constants.py`.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import onnx
from onnx import numpy_helper
from torch import Tensor

from device_agent.formats.manifest import Port
from exporters.memory.onnx_footprint import footprint
from exporters.onnx.int8_constants import add_int8
from exporters.programs.program import Program
from exporters.runtime_graph import Graph, Graphs


def with_constants(
    program: Program, graphs: Graphs, values: Mapping[str, Tensor]
) -> dict[str, Graph]:
    """Embed each frozen tensor that only one signature reads.

    Tensors that several signatures read stay in the weights file, so that no tensor is sent twice.
    TFLite graphs share one file and keep all of their inputs.

    Args:
        program: Of a submodel.
        graphs: Of every signature; they are not changed.
        values: Every stored tensor of the program, by name.

    Returns:
        The graphs to deploy, by signature name.
    """
    alone = read_alone(program)
    return {
        name: with_initializers(
            graph, {p.name: values[str(p.state)] for p in alone[name]}, program.int8
        )
        if graph.runtime == "onnx" and alone[name]
        else graph
        for name, graph in graphs.items()
    }


def read_alone(program: Program) -> dict[str, list[Port]]:
    """For each signature, its inputs that are frozen tensors and that no other signature reads."""
    frozen = {entry.name for entry in program.tensors if entry.role == "frozen" and entry.stored}
    readers = Counter(port.state for s in program.signatures for port in s.inputs)
    return {
        s.name: [p for p in s.inputs if p.state in frozen and readers[p.state] == 1]
        for s in program.signatures
    }


def with_initializers(
    graph: Graph, tensors: Mapping[str, Tensor], int8: Collection[str] = ()
) -> Graph:
    """The ONNX `graph` with `tensors` as constants instead of the inputs of the same names.

    Those in `int8` are 8-bit integers with scales.
    """
    model = onnx.load_from_string(graph.data)
    inputs = [value for value in model.graph.input if value.name not in tensors]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(
        numpy_helper.from_array(tensor.detach().contiguous().numpy(), name)
        for name, tensor in tensors.items()
        if name not in int8
    )
    dropped = set[str]()
    for name in tensors.keys() & set(int8):
        dropped |= add_int8(model, name, tensors[name])
    data = model.SerializeToString(deterministic=True)
    return replace(
        graph,
        data=data,
        size=len(data),
        footprint=partial(footprint, data),
        held=frozenset(tensors),
        dropped=frozenset(dropped),
    )
