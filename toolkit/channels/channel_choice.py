"""Choosing the channels that a narrower network keeps.

If an operator needs all channels of an axis, this axis keeps them, and the rest of the network
becomes narrower. If a reshape divides an axis, for example 48 features into 3 x 4 heads x 4, one of
the new axes is narrowed. This is the outer new axis (here the heads) if the operators allow it. In
a channel shuffle, it is the inner new axis: narrowing the outer axis would leave many more
parameters.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from torch.fx import Node

from exporters.recording.captured import Captured
from toolkit.channels.channel_tracking import track_channels
from toolkit.channels.channel_units import FIXED, Axis, Kept, Units
from toolkit.channels.operator_call import Requirement, TrackedChannels

MUCH_MORE = 1.25
"""The inner axis is narrowed if narrowing the outer axis would leave more than this many times the
parameters that narrowing the inner axis leaves."""


@dataclass(frozen=True)
class ChannelChoice:
    """The channels that are kept.

    Attributes:
        tracked: The channels of the model.
        kept: The units that are kept. A unit stands for all indices that must be kept together, see
            `channel_units.py`.
        unmet: Requirements that were not met. All channels of their axes are kept.
        reasons: Why a layer keeps all its output channels, by the layer's name.
    """

    tracked: TrackedChannels
    kept: Kept
    unmet: tuple[Requirement, ...]
    reasons: dict[str, str]

    @property
    def parameters(self) -> int:
        """The number of elements of the model's tensors that are kept."""
        return sum(
            math.prod(self.kept.count(axis) for axis in axes)
            for axes in self.tracked.tensors.values()
        )


def channel_window(units: Units, ratio: Fraction, first: int = 0) -> Kept:
    """Keep ceil(ratio * n) neighbouring channels of every group of n.

    Args:
        units: The channels.
        ratio: Share of the channels to keep.
        first: The window begins at channel `first` mod n. At the end of the group, the window
            continues at channel 0 (FedRolex, eq. 1). By default the window holds the leading
            channels (HeteroFL, section 3).
    """
    dropped: set[int] = set()
    for group in units.groups():
        start = first % len(group)
        dropped.update((group[start:] + group[:start])[math.ceil(ratio * len(group)) :])
    return units.without(dropped)


def choose_channels(captured: Captured, ratio: Fraction) -> ChannelChoice:
    """Keep the leading channels of every group, if the operators of the model allow it."""
    outer = keep_whole(track_fitting(captured, ratio, inner_first=False), ratio)
    if not outer.tracked.divisions and not outer.unmet:
        return outer
    inner = keep_whole(track_fitting(captured, ratio, inner_first=True), ratio)
    return inner if outer.parameters > MUCH_MORE * inner.parameters else outer


def track_fitting(captured: Captured, ratio: Fraction, inner_first: bool) -> TrackedChannels:
    """Track the channels so that all requirements of the operators are met, if possible.

    If a reshape divides an axis of channels, one of the new axes carries the channels (see
    `Division`). The function tries the new axes one after the other.
    """
    choices: dict[Node, int] = {}
    while True:
        tracked = track_channels(captured, choices, inner_first)
        unmet = unmet_requirements(tracked, channel_window(tracked.units, ratio))
        needed = free_roots(tracked.units, (axis for lack in unmet for axis in lack.axes))
        unfit = [
            division.node
            for division in tracked.divisions
            if needed & free_roots(tracked.units, [division.carrier])
        ]
        if not unfit:
            return tracked
        for node in unfit:
            choices[node] = choices.get(node, 0) + 1


def keep_whole(tracked: TrackedChannels, ratio: Fraction) -> ChannelChoice:
    """Keep the leading channels of every group. If an operator needs all channels, keep them.

    If a requirement would not be met, all channels of its axes are kept.
    """
    units, all_unmet, reasons = tracked.units, list[Requirement](), dict[str, str]()
    while unmet := unmet_requirements(tracked, kept := channel_window(units, ratio)):
        for requirement in unmet:
            needed = free_roots(units, requirement.axes)
            for name, layer in tracked.layers.items():
                if needed & free_roots(units, [layer.outputs]):
                    reasons.setdefault(name, requirement.reason)
        for requirement in unmet:
            for axis in requirement.axes:
                units.pin(axis)
        all_unmet += unmet
    return ChannelChoice(tracked, kept, tuple(all_unmet), reasons)


def unmet_requirements(tracked: TrackedChannels, kept: Kept) -> list[Requirement]:
    """The requirements that do not hold for the units that are kept."""
    return [requirement for requirement in tracked.requirements if not requirement.is_met(kept)]


def free_roots(units: Units, axes: Iterable[Axis]) -> set[int]:
    """The units of `axes` that may be dropped."""
    return {root for axis in axes for root in units.roots(axis).tolist()} - {FIXED}
