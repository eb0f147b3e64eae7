"""A traced signature beside its file: where the runtime has the value of each node."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx import Graph, GraphModule
from torch.fx.node import map_aggregate

from exporters.decompositions.decomposition import Decompositions


class Place(NamedTuple):
    """Where a runtime has the value of a node.

    Attributes:
        name: The name that `TracedGraph.values` knows it by.
        axes: Axis `a` of the node's value is axis `axes[a]` there; None for the same axes. Along
            an axis of size one there, the node's value may repeat.
    """

    name: str
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TracedGraph:
    """What a writer lowered, for verification.

    Attributes:
        module: The traced graph in float64, after the passes that shorten it. Its inputs and
            outputs are the signature's, in order.
        places: By name of a node of `module`, where the runtime has its value. Nodes that the
            writer merged with others are missing.
        values: Runs a file, given its content and inputs; returns the values of the given names.
        forms: The decompositions that the graph was traced with.
    """

    module: GraphModule
    places: Mapping[str, Place]
    values: Callable[[bytes, Mapping[str, np.ndarray], Sequence[str]], dict[str, np.ndarray]]
    forms: Decompositions


def in_double_precision(module: GraphModule) -> GraphModule:
    """A copy of a traced graph in float64, without its examples of values."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.meta = {}
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), double_type)
    return GraphModule(module, graph)


def double_type(argument: Any) -> Any:
    """float64 for float32; other arguments stay as they are."""
    return torch.float64 if argument is torch.float32 else argument
