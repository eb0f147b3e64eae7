"""Reads values inside an ONNX graph, for verification."""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import onnx
from torch.fx import GraphModule, Node

from device_agent.runtime.onnx_runtime import open_model
from exporters.programs.program import ProgramSignature
from exporters.programs.traced_graph import Place


def exposed_values(
    data: bytes, feeds: Mapping[str, np.ndarray], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Run a serialized graph; returns the values called `names`, inside it or outputs."""
    model = onnx.load_from_string(data)
    del model.graph.output[:]
    # ONNX Runtime infers the types.
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_model(model.SerializeToString(), 0)
    return dict(zip(names, session.run(list(names), dict(feeds)), strict=True))


def places_of(
    module: GraphModule, model: onnx.ModelProto, signature: ProgramSignature
) -> dict[str, Place]:
    """The value in `model` of each node of the traced graph `module`, by the node's name.

    torch.onnx names a value like its node. An output has the name of its port instead.
    """
    written = {name for node in model.graph.node for name in node.output}
    places = {node.name: Place(node.name) for node in module.graph.nodes if node.name in written}
    results = cast(list[Node], module.graph.output_node().args[0])
    for node, port in zip(results, signature.outputs, strict=True):
        if isinstance(node, Node) and node.op == "call_function":
            places[node.name] = Place(port.name)
    return places
