"""Rules for operators with weights: convolution, linear, embedding and normalisation layers."""

import numpy as np

from toolkit.channels.channel_units import Axes, Axis, Kept, fixed_axis
from toolkit.channels.operator_call import Layer, Rule, Step, Value, name_of


def note_layer(step: Step, inputs: Axis | None, outputs: Axis) -> None:
    """Record the input and output channels of the layer that `step` calls."""
    name = name_of(step.argument("weight"), step.node)
    step.tracked.layers[name] = Layer(inputs, outputs)


def join_bias(step: Step, channels: Axis) -> None:
    """Unite the axis of the bias with `channels`."""
    for axis in step.axes("bias"):
        step.units.join(axis, channels)


def linear(step: Step) -> Value:
    """A linear layer: (..., i) and weight (o, i) -> (..., o)."""
    x, (outputs, inputs) = step.axes("input"), step.axes("weight")
    step.units.join(x[-1], inputs)
    step.units.add_computed(outputs)
    join_bias(step, outputs)
    note_layer(step, inputs, outputs)
    return (*x[:-1], outputs)


def convolution(step: Step) -> Value:
    """Convolution: (N, i, ...) and weight (o, i / groups, ...), transposed (i, o / groups, ...)."""
    transposed = "transpose" in step.name or (
        step.takes("transposed") and step.argument("transposed")
    )
    x, weight = step.axes("input"), step.axes("weight")
    for axis in x[2:]:
        step.require_all(axis, "it moves a window along them")
    for axis in weight[2:]:
        step.units.pin(axis)
    inputs, groups = x[1], step.argument("groups")
    if groups == 1:
        outputs, taken = (weight[1], weight[0]) if transposed else (weight[0], weight[1])
        step.units.join(inputs, taken)
        step.units.add_computed(outputs)
    elif groups == len(inputs):
        outputs = depthwise(step, inputs, weight, transposed)
    else:
        outputs = grouped(step, inputs, weight, transposed)
    join_bias(step, outputs)
    note_layer(step, inputs, outputs)
    return (x[0], outputs, *map(fixed_axis, step.sizes()[2:]))


def depthwise(step: Step, inputs: Axis, weight: Axes, transposed: bool) -> Axis:
    """Output channels of a convolution that processes every channel separately."""
    multiplier = step.sizes()[1] // len(inputs)
    # Each input channel makes `multiplier` neighbouring output channels.
    outputs = np.repeat(inputs, multiplier)
    step.units.join(weight[0], inputs if transposed else outputs)
    step.units.pin(weight[1])
    step.edit("groups", lambda kept: kept.count(inputs))
    return outputs


def grouped(step: Step, inputs: Axis, weight: Axes, transposed: bool) -> Axis:
    """Output channels of a convolution in groups: every group keeps its leading channels.

    All groups share one axis of the weight, so they keep the same channels of this axis.
    """
    groups = step.argument("groups")
    if transposed:
        outputs = np.tile(weight[1], groups)
        step.units.join(inputs, weight[0])
        separate = inputs
    else:
        outputs = weight[0]
        step.units.join(inputs, np.tile(weight[1], groups))
        separate = outputs
    step.units.add_computed(outputs)
    require_equal_groups(step, separate, groups)
    return outputs


def require_equal_groups(step: Step, channels: Axis, groups: int) -> None:
    """Require that each group of neighbouring `channels` keeps the same number of channels."""
    members = np.split(channels, groups)
    for member in members:
        step.units.add_boundary(member)

    def check(kept: Kept) -> bool:
        return len({kept.count(member) for member in members}) == 1

    step.require(members, check, "its groups would keep unequal numbers of channels")


def embedding(step: Step) -> Value:
    """Weight (entries, o) and indices (...) -> (..., o)."""
    entries, outputs = step.axes("weight")
    step.units.pin(entries)
    step.units.add_computed(outputs)
    note_layer(step, None, outputs)
    return (*step.axes("indices"), outputs)


def channelwise(step: Step) -> Value:
    """Batch and instance norm, PReLU: (N, C, ...) and one number for each channel."""
    x, *own = step.inputs()
    for (axis,) in own:
        if len(axis) > 1:
            step.units.join(axis, x[1] if len(x) > 1 else x[0])
    return x


def layer_norm(step: Step) -> Value:
    """Layer and RMS norm over the last axes, computed over the channels that are kept."""
    x, *own = step.inputs()
    last = x[len(x) - len(step.argument("normalized_shape")) :]
    for axes in own:
        for axis, channels in zip(axes, last, strict=True):
            step.units.join(axis, channels)
    step.resize("normalized_shape", last)
    return x


def group_norm(step: Step) -> Value:
    """Drop the last channels of every group, so that no channel changes its group."""
    x, *own = step.inputs()
    groups, channels = step.argument("num_groups"), x[1]
    for (axis,) in own:
        step.units.join(axis, channels)
    if groups == len(channels):
        step.edit("num_groups", lambda kept: kept.count(channels))
        return x
    require_equal_groups(step, channels, groups)
    return x


def weight_norm(step: Step) -> Value:
    """Weight norm: g * v / ||v||, with one norm for each index of the axis `dim`."""
    v, g = step.axes("v"), step.axes("g")
    dim = step.argument("dim")
    if len(g[dim]) > 1:
        step.units.join(v[dim], g[dim])
    return v


SCALED: dict[str, Rule] = {
    "linear": linear,
    "conv1d": convolution,
    "conv2d": convolution,
    "conv3d": convolution,
    "convolution": convolution,
    "conv_transpose1d": convolution,
    "conv_transpose2d": convolution,
    "conv_transpose3d": convolution,
}
"""The operators whose outputs HeteroFL's Scaler divides by the channel ratio."""

RULES: dict[str, Rule] = {
    **SCALED,
    "embedding": embedding,
    "batch_norm": channelwise,
    "instance_norm": channelwise,
    "prelu": channelwise,
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "rms_norm": layer_norm,
    "_weight_norm": weight_norm,
}
