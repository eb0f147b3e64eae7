"""Tracking channels: a pass over a captured graph that finds the channels of every axis."""

import operator
import re
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from exporters.recording.captured import Captured
from toolkit.channels import (
    axis_moving_rules,
    elementwise_and_reduction_rules,
    product_rules,
    recurrent_rules,
    reshape_rules,
    weighted_rules,
)
from toolkit.channels.channel_units import Units
from toolkit.channels.operator_call import (
    Rule,
    Step,
    TrackedChannels,
    Value,
    fixed_axes,
    operator_name,
    require_unchanged,
)

RULES: dict[str, Rule] = {
    **weighted_rules.RULES,
    **product_rules.RULES,
    **recurrent_rules.RULES,
    **reshape_rules.RULES,
    **axis_moving_rules.RULES,
    **elementwise_and_reduction_rules.RULES,
}
SPATIAL = re.compile(r"(adaptive_)?(avg|max)_pool\dd|upsample_\w+\dd")


def track_channels(
    captured: Captured, choices: Mapping[Node, int] | None = None, inner_first: bool = False
) -> TrackedChannels:
    """Track the channels through both graphs of `captured`.

    This function refuses no model. The choice of kept channels decides whether the model's
    requirements are met (`TrackedChannels.requirements`).

    Args:
        captured: The model.
        choices: See TrackedChannels.
        inner_first: See TrackedChannels.
    """
    units = Units()
    tensors = {
        name: tuple(units.new_axis(size) for size in captured.shape(name))
        for name in captured.tensors
    }
    tracked = TrackedChannels(units, tensors, choices or {}, inner_first)
    # Both graphs run the same layers, so they share the units of parameters. Some operators are in
    # only one of the graphs.
    for graph in (captured.training, captured.inference):
        _track_graph(graph, tracked)
    return tracked


def _track_graph(graph: GraphModule, tracked: TrackedChannels) -> None:
    """Track the channels through one graph."""
    known: dict[Node, Value] = {}
    for node in graph.graph.nodes:
        step = Step(node, known, tracked)
        if node.op == "output":
            # The classes must not be dropped.
            for axes in step.inputs():
                for axis in axes:
                    tracked.units.pin(axis)
        elif node.op == "get_attr" and node.target in tracked.tensors:
            known[node] = tracked.tensors[node.target]
        elif node.op == "call_function":
            known[node] = rule_of(node)(step)
        else:
            known[node] = fixed_axes(node.meta.get("val"))


def rule_of(node: Node) -> Rule:
    """The rule for the operator that `node` calls."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return axis_moving_rules.getitem if node.target is operator.getitem else require_unchanged
    name = operator_name(node)
    if name in RULES:
        return RULES[name]
    # torch tags most elementwise operators, so they need no separate rules.
    if torch.Tag.pointwise in node.target.tags:
        return elementwise_and_reduction_rules.pointwise
    return elementwise_and_reduction_rules.spatial if SPATIAL.fullmatch(name) else require_unchanged
