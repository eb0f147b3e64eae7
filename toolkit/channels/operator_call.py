"""Describes one operator call for its rule: its arguments, axes and requirements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from exporters.programs.recorded_graph import module_of
from toolkit.channels.channel_units import FIXED, Axes, Axis, Kept, Units, fixed_axis

OPEN_SIZE = 10_007
"""Stands for the batch size. A large prime hardly ever divides a product of other sizes."""

Value = Axes | list[Axes] | None
"""The axes of a tensor or of several tensors; None for other values."""


@dataclass(frozen=True)
class Requirement:
    """`node` only works if the kept units satisfy `is_met`; `reason` says why.

    If the units do not satisfy `is_met`, all channels of `axes` are kept.
    """

    node: Node
    axes: tuple[Axis, ...]
    is_met: Callable[[Kept], bool]
    reason: str


@dataclass(frozen=True)
class Division:
    """A reshape that divides an axis of channels.

    One of the new axes, `carrier`, carries the channels: its indices are kept or dropped. The other
    new axes are kept whole. For example, if the 4 heads of 3 x 4 x 16 features are the carrier,
    whole heads are dropped.
    """

    node: Node
    carrier: Axis


@dataclass(frozen=True)
class Layer:
    """The channels of a layer's input and output; an embedding has no input channels."""

    inputs: Axis | None
    outputs: Axis


Edit = Callable[[Kept], None]
"""Changes a node to work with the channels that are kept."""


@dataclass
class TrackedChannels:
    """The channels of one model, and what its operators require."""

    units: Units
    tensors: dict[str, Axes]
    """Axes of each parameter and buffer."""
    choices: Mapping[Node, int] = field(default_factory=dict)
    """Maps the node of a division to the number of its possible carriers that were tried before."""
    inner_first: bool = False
    """Whether a division tries its new axes from the last to the first."""
    divisions: list[Division] = field(default_factory=list)
    requirements: list[Requirement] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    layers: dict[str, Layer] = field(default_factory=dict)


class Step:
    """One operator call. Its rule reads and edits the call with these methods."""

    def __init__(self, node: Node, axes: Mapping[Node, Value], tracked: TrackedChannels) -> None:
        self.node = node
        self.known = axes
        self.tracked = tracked
        self.units = tracked.units

    @property
    def name(self) -> str:
        """Name of the operator, without its overload."""
        return operator_name(self.node)

    @property
    def names(self) -> list[str]:
        """Names of the operator's arguments."""
        return [declared.name for declared in self.node.target._schema.arguments]  # type: ignore[union-attr]

    def takes(self, name: str) -> bool:
        """Whether the operator has an argument `name`."""
        return name in self.names

    def argument(self, name: str) -> Any:
        """The argument `name` as the graph has it, or its default."""
        index = self.names.index(name)
        if index < len(self.node.args):
            return self.node.args[index]
        declared = self.node.target._schema.arguments[index]  # type: ignore[union-attr]
        return self.node.kwargs.get(name, declared.default_value)

    def axes(self, name: str) -> Axes:
        """Axes of the tensor argument `name`; empty if it is not given."""
        return self.of(self.argument(name))

    def of(self, node: object) -> Axes:
        """Axes of the tensor `node`."""
        value = self.known.get(node) if isinstance(node, Node) else None
        assert not isinstance(value, list)
        return value or ()

    def inputs(self) -> list[Axes]:
        """Axes of all tensors that the operator reads."""
        return [axes for node in self.node.all_input_nodes if (axes := self.of(node))]

    def sizes(self) -> tuple[int, ...]:
        """Shape of the result, with OPEN_SIZE in place of the batch size."""
        return shape_of(self.node.meta["val"])

    def require_all(self, axis: Axis, reason: str) -> None:
        """Require that every index of `axis` is kept."""
        self.require([axis], lambda kept: kept.all(axis), reason)

    def require(self, axes: Sequence[Axis], is_met: Callable[[Kept], bool], reason: str) -> None:
        """Require that the kept units satisfy `is_met`, or else that `axes` are kept whole."""
        self.tracked.requirements.append(Requirement(self.node, tuple(axes), is_met, reason))

    def edit(self, name: str, value: Callable[[Kept], Any]) -> None:
        """Set the argument `name` to `value(kept)` as soon as the kept units are known."""
        index = self.names.index(name)

        def apply(kept: Kept) -> None:
            if index < len(self.node.args):
                self.node.update_arg(index, value(kept))
            else:
                self.node.update_kwarg(name, value(kept))

        self.tracked.edits.append(apply)

    def resize(self, name: str, axes: Sequence[Axis]) -> None:
        """Set the sizes of `axes` in the argument `name` as soon as the kept units are known."""
        given = list(self.argument(name))
        if len(given) != len(axes):
            for axis in axes:
                self.require_all(axis, "its sizes cannot be matched with its axes")
            return

        def new_size(size: Any, axis: Axis, kept: Kept) -> Any:
            if isinstance(size, Node):
                return size if kept.all(axis) else -1
            return kept.count(axis) if size >= 0 else size

        def sizes(kept: Kept) -> list[Any]:
            return [new_size(size, axis, kept) for size, axis in zip(given, axes, strict=True)]

        computed = [
            axis
            for size, axis in zip(given, axes, strict=True)
            if isinstance(size, Node) and not is_fixed(axis, self.units)
        ]
        # One size may be -1, for example that of batch * heads.
        if -1 in given or len(computed) > 1:
            for axis in computed:
                self.require_all(axis, "it computes a size from the number of channels")
        self.edit(name, sizes)


Rule = Callable[[Step], Value]


def operator_name(node: Node) -> str:
    """Name of the ATen operator that `node` calls, without its overload."""
    return str(node.target._schema.name).removeprefix("aten::")  # type: ignore[union-attr]


def name_of(weight: object, node: Node) -> str:
    """The module that owns `weight`; if there is none, the module that calls `node`."""
    if isinstance(weight, Node) and weight.op == "get_attr":
        return str(weight.target).rpartition(".")[0]
    return module_of(node)


def shape_of(value: Tensor) -> tuple[int, ...]:
    """Shape of a recorded tensor, with OPEN_SIZE in place of the batch size."""
    return tuple(size_of(size) for size in value.shape)


def size_of(size: int | torch.SymInt) -> int:
    """A size as a number, with OPEN_SIZE in place of the batch size."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, OPEN_SIZE)))


def fixed_axes(value: object) -> Value:
    """Axes that keep all of their indices, for one or more recorded tensors."""
    if isinstance(value, Tensor):
        return tuple(map(fixed_axis, shape_of(value)))
    if isinstance(value, list | tuple):
        return [axes for v in value if isinstance(axes := fixed_axes(v), tuple)]
    return None


def require_unchanged(step: Step) -> Value:
    """The rule for operators without a rule of their own: all channels of their inputs are kept."""
    for node in step.node.all_input_nodes:
        for axis in step.of(node):
            if node.op == "get_attr":
                # Channels of the operator's own weights (as in an LSTM with projections) must count
                # as computed, so that they can be refused.
                step.units.add_computed(axis)
            step.require_all(axis, "no rule describes what it does with channels")
    return fixed_axes(step.node.meta.get("val"))


def is_fixed(axis: Axis, units: Units) -> bool:
    """Whether it is already known that `axis` keeps all of its indices."""
    return bool(np.all(units.roots(axis) == FIXED))
