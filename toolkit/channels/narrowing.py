"""The network with fewer channels: choosing them, editing the graphs, slicing the tensors."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from exporters.programs import source_lines
from exporters.programs.capture import record_current_mode
from exporters.programs.captured import Captured
from exporters.programs.recorded_graph import attribute, attributes_read, module_of
from profiles.errors import SpecError
from toolkit.channels.channel_tracking import track_channels
from toolkit.channels.channel_units import Kept, Units
from toolkit.channels.operator_call import (
    Layer,
    Requirement,
    TrackedChannels,
    name_of,
    operator_name,
)
from toolkit.channels.weighted_rules import SCALED
from toolkit.submodels.tensor_slices import Ranges, take_slice


@dataclass(frozen=True)
class Narrowed:
    """A model with fewer channels.

    Attributes:
        captured: The narrowed model.
        ranges: For each tensor that became smaller, the elements that it keeps.
        layers: The channels of each layer before narrowing.
        kept: The units that are kept.
    """

    captured: Captured
    ranges: dict[str, Ranges]
    layers: dict[str, Layer]
    kept: Kept


def leading_channels(units: Units, ratio: Fraction) -> Kept:
    """Keep the leading ceil(ratio * n) channels of every group of n (HeteroFL, section 3)."""
    groups = units.groups()
    return units.without({unit for g in groups for unit in g[math.ceil(ratio * len(g)) :]})


def narrow(captured: Captured, ratio: Fraction, spec: str, scaler: bool = False) -> Narrowed:
    """Keep the leading ceil(ratio * n) channels of each group of n.

    Args:
        captured: The model. Its graphs are edited.
        ratio: Share of the channels to keep, above 0 and at most 1.
        spec: The spec, for messages.
        scaler: Divide what narrowed layers compute by `ratio`, in training only.

    Returns:
        The narrowed model.

    Raises:
        SpecError: If channels cannot be tracked through an operator, or none would be dropped.
    """
    tracked = track_channels(captured)
    kept = leading_channels(tracked.units, ratio)
    for requirement in tracked.requirements:
        if not requirement.is_met(kept):
            raise _untracked(requirement, spec)
    check_smaller(tracked, kept, ratio, spec)
    # All requirements are met, so that the graphs can be edited now.
    for edit in tracked.edits:
        edit(kept)
    if scaler:
        add_scalers(captured.training, tracked, kept, float(ratio))
    ranges = {
        name: tuple(kept.ranges(axis) for axis in axes)
        for name, axes in tracked.tensors.items()
        if not all(kept.all(axis) for axis in axes)
    }

    def smaller(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: take_slice(t, ranges[n]) if n in ranges else t for n, t in tensors.items()}

    tensors = smaller(captured.tensors)
    small = replace(
        captured,
        training=rebuilt(captured.training, tensors, captured),
        inference=rebuilt(captured.inference, tensors, captured),
        parameters=smaller(captured.parameters),
        frozen=smaller(captured.frozen),
        buffers=smaller(captured.buffers),
    )
    return Narrowed(small, ranges, tracked.layers, kept)


def add_scalers(graph: GraphModule, tracked: TrackedChannels, kept: Kept, ratio: float) -> None:
    """Divide the output of every convolution and linear layer that loses outputs by `ratio`.

    HeteroFL's Scaler. The classifier loses no outputs.
    """
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or operator_of(node) not in SCALED:
            continue
        outputs = tracked.layers[name_of(node.args[1], node)].outputs
        if kept.all(outputs):
            continue
        with graph.graph.inserting_after(node):
            scaled = graph.graph.call_function(torch.ops.aten.div.Tensor, (node, ratio))
        scaled.meta = dict(node.meta)
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user, one=scaled: user is not one)


def operator_of(node: Node) -> str:
    """Name of the ATen operator that `node` calls; empty if it calls something else."""
    return operator_name(node) if isinstance(node.target, torch._ops.OpOverload) else ""


def _untracked(requirement: Requirement, spec: str) -> SpecError:
    module = module_of(requirement.node)
    where = f" in {module!r}" if module else ""
    line = source_lines.parenthesized(source_lines.line_of_node(requirement.node))
    return SpecError(
        f"{spec!r}: channels cannot be tracked through {requirement.node.target}{where}: "
        f"{requirement.reason}{line}. Use slice or low-rank for this model, or replace the "
        "operator.",
        code="spec.untracked-channels",
        spec=spec,
        operator=str(requirement.node.target),
        module=module,
        reason=requirement.reason,
    )


def check_smaller(tracked: TrackedChannels, kept: Kept, ratio: Fraction, spec: str) -> None:
    """Raise SpecError if `ratio` is below 1 but drops no channel."""
    largest = max(map(len, tracked.units.groups()), default=1)
    if largest == 1 and ratio < 1:
        raise SpecError(
            f"{spec!r}: no layer of this model has channels to drop between input and classes. "
            "Use another family.",
            code="spec.nothing-smaller",
            spec=spec,
        )
    if ratio < 1 and kept.units.all():
        highest = f"{(largest - 1) / largest:.4g}"
        raise SpecError(
            f"{spec!r}: every layer would keep all its channels. Use a ratio of at most "
            f"{highest}, or 1.",
            code="spec.nothing-smaller",
            spec=spec,
            highest_ratio=float(highest),
        )


def rebuilt(graph: GraphModule, tensors: dict[str, Tensor], captured: Captured) -> GraphModule:
    """`graph` recorded again with `tensors`, for the samples that `captured` takes."""
    root = {
        name: tensors[name] if name in tensors else attribute(graph, name)
        for name in attributes_read(graph)
    }
    # Recording again checks the edited graph and computes all shapes.
    return record_current_mode(
        GraphModule(root, graph.graph), captured.sample_shape, captured.sample_dtype
    )
