"""A walk over a captured graph that gives every axis of every tensor its channels."""

import operator
import re

import torch
from torch.fx import GraphModule, Node

from exporters.programs.captured import Captured
from toolkit.channels import axis_rules, plain_rules, recurrent_rules, reshape_rules, weighted_rules
from toolkit.channels.channel_units import Units
from toolkit.channels.operator_call import (
    Followed,
    Rule,
    Step,
    Value,
    operator_name,
    unknown,
    untouched,
)

RULES: dict[str, Rule] = {
    **weighted_rules.RULES,
    **recurrent_rules.RULES,
    **reshape_rules.RULES,
    **axis_rules.RULES,
    **plain_rules.RULES,
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
                    followed.units.pin(axis)
        elif node.op == "get_attr" and node.target in followed.tensors:
            known[node] = followed.tensors[node.target]
        elif node.op == "call_function":
            known[node] = rule_of(node)(step)
        else:
            known[node] = untouched(node.meta.get("val"))


def rule_of(node: Node) -> Rule:
    """The rule of the operator that `node` calls."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return axis_rules.getitem if node.target is operator.getitem else unknown
    name = operator_name(node)
    if torch.Tag.pointwise in node.target.tags:
        return plain_rules.pointwise
    if SPATIAL.fullmatch(name):
        return plain_rules.spatial
    return RULES.get(name, unknown)
