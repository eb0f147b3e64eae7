"""Checks of ids that a model computes from the numbers in its samples."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from exporters.onnx.traced_passes.traced_nodes import add_before, shape_of
from exporters.programs.recorded_graph import casts_to_integers

aten = torch.ops.aten


def refuse_negative_ids(graph: GraphModule) -> None:
    """Let the runtime fail if a number of a sample becomes a negative id.

    PyTorch refuses negative ids. ONNX would count from the end of the embedding table, and the
    wrong row would be trained. The agent checks integer samples, but it does not check ids in float
    samples.
    """
    ids: set[Node] = set()
    for node in graph.graph.nodes:
        given = ids.intersection(node.all_input_nodes)
        if node.target is aten.embedding.default and node.args[1] in given:
            table, rows = node.args[:2]
            behind = int(shape_of(table)[0])
            negative = add_before(node, aten.lt.Scalar, rows, 0)
            checked = add_before(node, aten.masked_fill.Scalar, rows, negative, behind)
            node.update_arg(1, checked)
        elif is_cast(node) or (given and is_integer(node)):
            ids.add(node)


def is_cast(node: Node) -> bool:
    """Whether `node` turns float numbers into integers."""
    return node.target is aten._to_copy.default and casts_to_integers(node)


def is_integer(node: Node) -> bool:
    """Whether the result of `node` is a tensor of integers."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)
