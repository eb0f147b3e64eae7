"""Capacity accounting: parameters, activations and multiply-accumulates of a captured graph.

EmbracingFL, Table 1: the capacity of a submodel is (p + a) / (P + A). p and P are the trained
parameters of the submodel and of the full model. a and A are the output elements of their
convolution and linear layers for one batch. Shortcut convolutions count; normalisation, activation,
pooling and embedding do not.

An LSTM counts 10 values for each unit, step and direction: four gates before and after their
nonlinearity, the cell state and the hidden state. In the paper's table the layer after the LSTM,
which has one output for each sample, does not count. Layers with one output are therefore left out
here. Other recurrent layers count by their parameters and multiply-accumulates only.
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

    Attributes:
        params: Trained parameters.
        activations: Output elements of convolution and linear layers, and values inside LSTMs.
        macs: Multiply-accumulates of one forward pass through the trained part.
        exchanged: Numbers that an update holds.
    """

    params: int
    activations: int
    macs: int
    exchanged: int

    def capacity(self, full: "Counts") -> float:
        """(p + a) / (P + A), relative to the counts of the full model."""
        return (self.params + self.activations) / (full.params + full.activations)


def shape_for_batch(node: Node, batch: int) -> list[int]:
    """The shape of the value of `node` for `batch` samples; the batch may be any axis."""
    return [
        # The graph was recorded for any batch size, so that sizes may be expressions in its symbol.
        int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, batch)))
        if isinstance(size, torch.SymInt)
        else size
        for size in node.meta["val"].shape
    ]


def count_elements(node: Node, batch: int) -> int:
    """How many numbers the value of `node` holds for `batch` samples."""
    return math.prod(shape_for_batch(node, batch))


def lstm_nodes(graph: GraphModule) -> Iterator[Node]:
    """The LSTM nodes of `graph`; one node is all layers and directions."""
    return (node for node in graph.graph.nodes if node.target is LSTM)


def recurrent_steps(node: Node) -> int:
    """How many steps the recurrent layer `node` takes along its input."""
    # Positions in the signature of aten.lstm.input.
    source, batch_first = node.args[0], node.args[8]
    assert isinstance(source, Node)
    return int(source.meta["val"].shape[1 if batch_first else 0])


def lstm_units(node: Node) -> int:
    """Units of the LSTM `node` over all its layers and directions."""
    # The initial states are (hidden, cell). The cell state has all units even with projections.
    cell = node.args[1][1]  # type: ignore[index]
    assert isinstance(cell, Node)
    layers, _, units = cell.meta["val"].shape
    return int(layers) * int(units)


def count_activations(graph: GraphModule, batch: int) -> int:
    """Activations of all layers that count (see the module), for `batch` samples."""
    return sum(activations_of(node, batch) for node in graph.graph.nodes)


def activations_of(node: Node, batch: int) -> int:
    """Activations of the operator `node` for `batch` samples; 0 if it does not count."""
    if node.target is LSTM:
        return batch * LSTM_VALUES * lstm_units(node) * recurrent_steps(node)
    size = count_elements(node, batch) if node.target in WEIGHTED else 0
    # A layer with one output for each sample does not count.
    return size if size > batch else 0


def count_macs(graph: GraphModule, batch: int) -> int:
    """Multiply-accumulates of one run of `graph` on `batch` samples, counted as for exports."""
    inputs = (node for node in graph.graph.nodes if node.op == "placeholder")
    # The count depends on shapes only, so that zeros will do.
    vals = [(shape_for_batch(node, batch), node.meta["val"].dtype) for node in inputs]
    return macs_of(lambda: graph(*(torch.zeros(shape, dtype=dtype) for shape, dtype in vals)))


def count_parameters(graph: GraphModule, parameters: Mapping[str, torch.Tensor]) -> int:
    """How many numbers the `parameters` that `graph` reads hold."""
    return sum(parameters[n].numel() for n in attributes_read(graph) if n in parameters)
