"""A walk over a captured graph that gives every axis of every tensor its channels."""

import operator
import re

import torch
from torch.fx import GraphModule, Node

from exporters.capture import Captured
from toolkit.channels import layouts, plain, recurrent, reshaping, weighted
from toolkit.channels.step import Followed, Rule, Step, Value, operator_name, unknown, untouched
from toolkit.channels.units import Units

RULES: dict[str, Rule] = {
    **weighted.RULES,
    **recurrent.RULES,
    **reshaping.RULES,
    **layouts.RULES,
    **plain.RULES,
}
SPATIAL = re.compile(r"(adaptive_)?(avg|max)_pool\dd|upsample_\w+\dd")


def follow(captured: Captured) -> Followed:
    """Follow the channels through both graphs of `captured`.

    Nothing is refused yet: that depends on what is kept (`Followed.needs`).
    """
    units = Units()
    tensors = {
        name: tuple(units.fresh(size) for size in captured.shape(name)) for name in captured.tensors
    }
    followed = Followed(units, tensors)
    for graph in (captured.training, captured.inference):
        walk(graph, followed)
    return followed


def walk(graph: GraphModule, followed: Followed) -> None:
    """Follow the channels through one graph."""
    known: dict[Node, Value] = {}
    for node in graph.graph.nodes:
        step = Step(node, known, followed)
        if node.op == "output":
            for axes in step.inputs():
                for axis in axes:
                    followed.units.fix(axis)
        elif node.op == "get_attr" and node.target in followed.tensors:
            known[node] = followed.tensors[node.target]
        elif node.op == "call_function":
            known[node] = rule_of(node)(step)
        else:
            known[node] = untouched(node.meta.get("val"))


def rule_of(node: Node) -> Rule:
    """The rule of the operator that `node` calls."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return layouts.getitem if node.target is operator.getitem else unknown
    name = operator_name(node)
    if torch.Tag.pointwise in node.target.tags:
        return plain.pointwise
    if SPATIAL.fullmatch(name):
        return plain.spatial
    return RULES.get(name, unknown)
