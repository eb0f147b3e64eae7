"""Fixes the random numbers that a model draws when it predicts.

A prediction has no seed, so it uses the same numbers in each call and for each sample. So the
prediction for a sample does not depend on the other samples of the batch, or on the sample's place
in the batch.
"""

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node

from exporters.programs.seeded_random import UNIFORM, uniform_numbers

SEED = 0


def fix_draws(graph: GraphModule) -> None:
    """Replace the uniform draws of `graph` by constants.

    Along an axis whose size depends on the batch, all numbers are equal.
    """
    draws = graph.graph.find_nodes(op="call_function", target=UNIFORM)
    for number, node in enumerate(draws):
        fix_draw(graph, node, number)
    if draws:
        graph.graph.eliminate_dead_code()
        graph.recompile()


def fix_draw(graph: GraphModule, node: Node, number: int) -> None:
    """Replace draw `number` of `graph` by a constant that has the size one along the batch."""
    value, sizes = node.meta["val"], node.args[0]
    assert isinstance(value, Tensor)
    shape = [1 if isinstance(size, SymInt) else int(size) for size in value.shape]
    name = f"fixed_draw_{number}"
    fixed = uniform_numbers(shape, torch.tensor(SEED), number + 1)
    graph.register_buffer(name, fixed.to(value.dtype), persistent=False)
    with graph.graph.inserting_before(node):
        constant = graph.graph.get_attr(name)
        drawn = graph.graph.call_function(torch.ops.aten.expand.default, (constant, sizes))
    constant.meta = {**node.meta, "val": value.new_empty(shape)}
    drawn.meta = dict(node.meta)
    node.replace_all_uses_with(drawn)
    graph.graph.erase_node(node)
