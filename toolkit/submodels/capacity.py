"""Counts parameters, activations and multiply-accumulates of a recorded graph, for its capacity.

EmbracingFL, Table 1: the capacity of a submodel is (p + a) / (P + A). p and P are the trained
parameters of the submodel and of the full model. a and A are the output elements of their
convolution and linear layers for one batch. Shortcut convolutions count; normalisation, activation,
pooling and embedding do not count.

For an LSTM, 10 values count for each unit, step and direction: four gates before and after their
nonlinearity, the cell state and the hidden state. In the paper's table, the layer after the LSTM is
not counted; it has one output for each sample. Therefore layers with one output are left out here.
For other recurrent layers, only parameters and multiply-accumulates are counted.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from exporters.programs.operation_counts import macs_of
from exporters.programs.recorded_graph import attributes_read
from exporters.recurrence import packed_layers

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
        exchanged: Numbers in an update.
    """

    params: int
    activations: int
    macs: int
    exchanged: int

    def capacity(self, full: "Counts") -> float:
        """The capacity (p + a) / (P + A), relative to the counts of the full model."""
        return (self.params + self.activations) / (full.params + full.activations)


def shape_for_batch(node: Node, batch: int) -> list[int]:
    """The shape of the value of `node` for `batch` samples. Any axis may be the batch."""
    return [
        # The graph was recorded for any batch size, so a size may be an expression in its symbol.
        int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, batch)))
        if isinstance(size, torch.SymInt)
        else size
        for size in node.meta["val"].shape
    ]


def count_elements(node: Node, batch: int) -> int:
    """The number of elements in the value of `node` for `batch` samples."""
    return math.prod(shape_for_batch(node, batch))


def lstm_nodes(graph: GraphModule) -> Iterator[Node]:
    """The LSTM nodes of `graph`. One node has all layers and directions of an LSTM."""
    return (node for node in graph.graph.nodes if node.target is LSTM)


def recurrent_steps(node: Node) -> int:
    """The number of steps that the recurrent layer `node` takes along its input."""
    # Positions in the signature of aten.lstm.input.
    source, batch_first = node.args[0], node.args[8]
    assert isinstance(source, Node)
    return int(source.meta["val"].shape[1 if batch_first else 0])


def lstm_units(node: Node) -> int:
    """Units of the LSTM `node` over all its layers and directions."""
    # The initial states are (hidden, cell). With projections, only the cell state has all units.
    cell = node.args[1][1]  # type: ignore[index]
    assert isinstance(cell, Node)
    layers, _, units = cell.meta["val"].shape
    return int(layers) * int(units)


def count_activations(graph: GraphModule, batch: int) -> int:
    """Activations of all layers that count (see the module), for `batch` samples."""
    return sum(activations_of(node, batch) for node in graph.graph.nodes)


def activations_of(node: Node, batch: int) -> int:
    """Activations of the operator `node` for `batch` samples; 0 if it does not count."""
    if node.target in (LSTM, packed_layers.lstm):
        return batch * LSTM_VALUES * lstm_units(node) * recurrent_steps(node)
    size = count_elements(node, batch) if node.target in WEIGHTED else 0
    # A layer with one output for each sample does not count.
    return size if size > batch else 0


def count_macs(graph: GraphModule, batch: int) -> int:
    """Multiply-accumulates of one run of `graph` on `batch` samples, counted as in exports."""
    inputs = (node for node in graph.graph.nodes if node.op == "placeholder")
    # The count depends only on shapes, so zeros are enough.
    vals = [(shape_for_batch(node, batch), node.meta["val"].dtype) for node in inputs]
    return macs_of(lambda: graph(*(torch.zeros(shape, dtype=dtype) for shape, dtype in vals)))


def count_parameters(graph: GraphModule, parameters: Mapping[str, torch.Tensor]) -> int:
    """The number of elements in all tensors of `parameters` that `graph` reads."""
    return sum(parameters[n].numel() for n in attributes_read(graph) if n in parameters)
