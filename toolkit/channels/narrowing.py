"""Builds the network with fewer channels: edits the graphs and slices the tensors."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from exporters.programs import source_lines
from exporters.programs.recorded_graph import attribute, attributes_read, module_of
from exporters.recording.capture import record_current_mode
from exporters.recording.captured import Captured
from exporters.recording.inputs.input_ranges import with_input_range
from exporters.recording.inputs.packed_inputs import ATTRIBUTE as PARTS
from profiles.errors import SpecError
from toolkit.channels.channel_choice import channel_window, choose_channels
from toolkit.channels.channel_units import Axes, Kept, Units
from toolkit.channels.operator_call import (
    Layer,
    Requirement,
    TrackedChannels,
    name_of,
    operator_name,
)
from toolkit.channels.weighted_rules import SCALED
from toolkit.submodels.submodel import Ranges
from toolkit.submodels.tensor_slices import take_slice


@dataclass(frozen=True)
class Narrowed:
    """A model with fewer channels.

    Attributes:
        captured: The narrowed model, with the leading channels.
        ratio: Share of the channels that are kept.
        units: The channels before narrowing.
        tensors: Axes of each parameter and buffer before narrowing.
        layers: The channels of each layer before narrowing.
        kept: The units that are kept. A unit stands for all indices that must be kept together, see
            `channel_units.py`.
        reasons: Why a layer keeps all its output channels, by the layer's name.
    """

    captured: Captured
    ratio: Fraction
    units: Units
    tensors: dict[str, Axes]
    layers: dict[str, Layer]
    kept: Kept
    reasons: dict[str, str]

    def window(self, first: int) -> dict[str, Ranges]:
        """Map each tensor that became smaller to its elements in one window.

        The window begins at channel `first`. The elements are given as ranges along each axis.

        The same graphs serve all windows, because each window keeps the same number of channels.
        """
        return ranges_of(self.tensors, channel_window(self.units, self.ratio, first))


def narrow(captured: Captured, ratio: Fraction, spec: str, scaler: bool = False) -> Narrowed:
    """Keep the leading ceil(ratio * n) channels of each group of n.

    Args:
        captured: The model.
        ratio: Share of the channels to keep, above 0 and at most 1.
        spec: The spec, for messages.
        scaler: Whether to divide the outputs of narrowed layers by `ratio`, in training only.

    Returns:
        The narrowed model.

    Raises:
        SpecError: If no channel would be dropped, because operators need all of them or because
            the ratio is too high.
    """
    # Copy the graphs, because they are edited below.
    captured = replace(
        captured, training=copied(captured.training), inference=copied(captured.inference)
    )
    choice = choose_channels(captured, ratio)
    tracked, kept = choice.tracked, choice.kept
    if ratio < 1 and choice.unmet and kept.units.all():
        raise _untracked(choice.unmet[0], spec)
    check_smaller(tracked, kept, ratio, spec)
    # All requirements are met now, so the graphs can be edited.
    for edit in tracked.edits:
        edit(kept)
    if scaler:
        add_scalers(captured.training, tracked, kept, float(ratio))
    ranges = ranges_of(tracked.tensors, kept)

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
    return Narrowed(
        small, ratio, tracked.units, tracked.tensors, tracked.layers, kept, choice.reasons
    )


def ranges_of(tensors: dict[str, Axes], kept: Kept) -> dict[str, Ranges]:
    """Map each of `tensors` that loses elements to the ranges that it keeps along each axis."""
    return {
        name: tuple(kept.ranges(axis) for axis in axes)
        for name, axes in tensors.items()
        if not all(kept.all(axis) for axis in axes)
    }


def copied(graph: GraphModule) -> GraphModule:
    """A copy of `graph` with the same tensors."""
    nodes = Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    nodes.output_node().meta = dict(graph.graph.output_node().meta)
    nodes.set_codegen(graph.graph._codegen)
    return GraphModule(graph, nodes)


def add_scalers(graph: GraphModule, tracked: TrackedChannels, kept: Kept, ratio: float) -> None:
    """Divide by `ratio` the output of every convolution and linear layer that loses outputs.

    This is HeteroFL's Scaler. The classifier loses no outputs.
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
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user, own=scaled: user is not own)


def operator_of(node: Node) -> str:
    """Name of the ATen operator that `node` calls; empty if it calls something else."""
    return operator_name(node) if isinstance(node.target, torch._ops.OpOverload) else ""


def _untracked(requirement: Requirement, spec: str) -> SpecError:
    module = module_of(requirement.node)
    where = f" in {module!r}" if module else ""
    line = source_lines.parenthesized(source_lines.line_of_node(requirement.node))
    return SpecError(
        "{spec!r}: every layer would keep all its channels. They cannot be tracked through "
        "{operator}{place}: {reason}{line}. Use cp for this model, or run `edgetailor "
        "inspect` to see which other families fit.",
        code="spec.untracked-channels",
        spec=spec,
        operator=str(requirement.node.target),
        module=module,
        reason=requirement.reason,
        place=where,
        line=line,
    )


def check_smaller(tracked: TrackedChannels, kept: Kept, ratio: Fraction, spec: str) -> None:
    """Raise SpecError if `ratio` is below 1 but drops no channel."""
    largest = max(map(len, tracked.units.groups()), default=1)
    if largest == 1 and ratio < 1:
        raise SpecError(
            "{spec!r}: no layer between the input and the classes has channels that can be "
            "dropped. Use another family.",
            code="spec.nothing-smaller",
            spec=spec,
        )
    if ratio < 1 and kept.units.all():
        highest = (
            math.floor(1e4 * (largest - 1) / largest) / 1e4
        )  # a ratio rounded up would be refused
        raise SpecError(
            "{spec!r}: with this ratio, every layer would keep all its channels. Use "
            "{highest_ratio} or less. For the whole model, use 1.",
            code="spec.nothing-smaller",
            spec=spec,
            highest_ratio=highest,
        )


def rebuilt(graph: GraphModule, tensors: dict[str, Tensor], captured: Captured) -> GraphModule:
    """`graph` recorded again with `tensors`, for the samples that `captured` takes."""
    root = {
        name: tensors[name] if name in tensors else attribute(graph, name)
        for name in attributes_read(graph)
    }
    # Recording again checks the edited graph and computes all shapes.
    module = with_input_range(GraphModule(root, graph.graph), captured.input_range)
    setattr(module, PARTS, captured.parts)
    return record_current_mode(module, captured.sample_shape, captured.sample_dtype)
