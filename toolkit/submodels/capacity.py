"""Capacity accounting: parameters, activations and multiply-accumulates of a captured graph.

EmbracingFL, Table 1: the capacity of a submodel is (p + a) / (P + A), where p, P count trained
parameters and a, A the output elements of convolution and linear layers for one batch. Shortcut
convolutions count; normalisation, activation, pooling and embedding do not. An LSTM counts 10
values for each unit, step and direction: four gates ahead of and behind their nonlinearity, cell
and hidden state. The table's rows of the LSTM leave the layer behind it out, which gives one number
a sample; so such layers do not count here. Other recurrent layers count by their parameters and
multiply-accumulates only.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from exporters.programs.operation_counts import macs_of
from exporters.programs.recorded_graph import attributes_read

aten = torch.ops.aten
WEIGHTED = (
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.convolution.default,
    aten.linear.default,
)
LSTM = aten.lstm.input
LSTM_VALUES = 10


@dataclass(frozen=True)
class Counts:
    """Sizes of a submodel for one batch.

    `params` trained parameters, `activations` output elements of convolution and linear layers and
    values inside LSTMs, `macs` multiply-accumulates of one forward pass through what is trained,
    `exchanged` numbers that an update carries.
    """

    params: int
    activations: int
    macs: int
    exchanged: int

    def capacity(self, full: "Counts") -> float:
        """(p + a) / (P + A) against the full model's counts."""
        return (self.params + self.activations) / (full.params + full.activations)


def weighted_nodes(graph: GraphModule) -> Iterator[Node]:
    """The convolution and linear nodes of `graph`."""
    return (node for node in graph.graph.nodes if node.target in WEIGHTED)


def sizes(node: Node, batch: int) -> list[int]:
    """The shape of the value of `node` for `batch` samples, wherever their axis is."""
    return [
        int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, batch)))
        if isinstance(size, torch.SymInt)
        else size
        for size in node.meta["val"].shape
    ]


def elements(node: Node, batch: int) -> int:
    """Numbers in the value of `node` for `batch` samples."""
    return math.prod(sizes(node, batch))


def lstm_nodes(graph: GraphModule) -> Iterator[Node]:
    """The LSTMs of `graph`, each with all its layers and directions."""
    return (node for node in graph.graph.nodes if node.target is LSTM)


def recurrent_steps(node: Node) -> int:
    """Steps that the recurrent layer `node` goes along its input."""
    source, batch_first = node.args[0], node.args[8]
    assert isinstance(source, Node)
    return int(source.meta["val"].shape[1 if batch_first else 0])


def lstm_states(node: Node) -> int:
    """Units of the LSTM `node` in all its layers and directions."""
    cell = node.args[1][1]  # type: ignore[index]
    assert isinstance(cell, Node)
    layers, _, units = cell.meta["val"].shape
    return int(layers) * int(units)


def activations(graph: GraphModule, batch: int) -> int:
    """Values of all layers that count, for `batch` samples: see the module."""
    layers = (elements(node, batch) for node in weighted_nodes(graph))
    steps = (LSTM_VALUES * lstm_states(node) * recurrent_steps(node) for node in lstm_nodes(graph))
    return sum(size for size in layers if size > batch) + batch * sum(steps)


def macs(graph: GraphModule, batch: int) -> int:
    """Multiply-accumulates of one run of `graph` on `batch` samples, as `export` counts them."""
    inputs = (node for node in graph.graph.nodes if node.op == "placeholder")
    vals = [(sizes(node, batch), node.meta["val"].dtype) for node in inputs]
    return macs_of(lambda: graph(*(torch.zeros(shape, dtype=dtype) for shape, dtype in vals)))


def parameter_count(graph: GraphModule, parameters: Mapping[str, torch.Tensor]) -> int:
    """Numbers in those of `parameters` that `graph` reads."""
    return sum(parameters[n].numel() for n in attributes_read(graph) if n in parameters)
