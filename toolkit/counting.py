"""Capacity accounting: parameters, activations and multiply-accumulates of a captured graph.

EmbracingFL, Table 1: the capacity of a submodel is (p + a) / (P + A), where p, P count trained
parameters and a, A the output elements of convolution and linear layers for one batch. Shortcut
convolutions count; normalisation, activation, pooling and embedding do not.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from exporters.capture import attributes_read

aten = torch.ops.aten
WEIGHTED = (
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.convolution.default,
    aten.linear.default,
)


@dataclass(frozen=True)
class Counts:
    """Sizes of a submodel for one batch.

    `params` trained parameters, `activations` output elements of convolution and linear layers,
    `macs` multiply-accumulates of one forward pass through what is trained, `exchanged` numbers
    that an update carries.
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


def elements(node: Node, batch: int) -> int:
    """Output elements of `node` for `batch` samples."""
    return batch * math.prod(int(size) for size in node.meta["val"].shape[1:])


def activations(graph: GraphModule, batch: int) -> int:
    """Output elements of all convolution and linear layers for `batch` samples."""
    return sum(elements(node, batch) for node in weighted_nodes(graph))


def macs(graph: GraphModule, batch: int) -> int:
    """Multiply-accumulates of the convolution and linear layers for `batch` samples."""
    total = 0
    for node in weighted_nodes(graph):
        weight = node.args[1]
        assert isinstance(weight, Node)
        total += elements(node, batch) * math.prod(weight.meta["val"].shape[1:])
    return total


def parameter_count(graph: GraphModule, parameters: dict[str, torch.Tensor]) -> int:
    """Numbers in those of `parameters` that `graph` reads."""
    return sum(parameters[n].numel() for n in attributes_read(graph) if n in parameters)
