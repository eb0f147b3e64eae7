"""Reads and adds nodes of a traced graph, whose sizes may depend on the batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument, map_arg

Size = int | torch.SymInt


def shape_of(node: object) -> Sequence[Size]:
    """The shape of the tensor `node`."""
    assert isinstance(node, Node)
    shape: Sequence[Size] = node.meta["val"].shape
    return shape


def same_sizes(first: Sequence[Size], second: Sequence[Size]) -> bool:
    """Whether the sizes are equal for every batch size.

    A plain comparison would use the batch size of the example inputs. Then the graph would accept
    only this batch size.
    """
    return len(first) == len(second) and all(
        statically_known_true(a == b) for a, b in zip(first, second, strict=True)
    )


def is_known(*sizes: Size) -> bool:
    """Whether no size depends on the batch."""
    return all(isinstance(size, int) for size in sizes)


def add_before(reader: Node, target: Any, *arguments: Argument, **options: Argument) -> Node:
    """Add the operator `target` before `reader`, and note the shape and type of its result."""
    with reader.graph.inserting_before(reader):
        node = reader.graph.call_function(target, arguments, options)
    known = map_arg((arguments, options), lambda given: given.meta["val"])
    node.meta["val"] = target(*known[0], **known[1])
    return node
