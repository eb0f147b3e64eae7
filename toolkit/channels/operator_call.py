"""What a rule sees of one operator call, and what it can say about it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from exporters.programs.recorded_graph import module_of
from toolkit.channels.channel_units import FIXED, Axes, Axis, Kept, Units, fixed

OPEN_SIZE = 10_007
"""Stands for the batch's size: no product of a model's own sizes equals a multiple of it."""

Value = Axes | list[Axes] | None
"""Axes of a tensor or of several; None for what is no tensor."""


@dataclass(frozen=True)
class Need:
    """`node` works only where `met` holds of what is kept; `reason` says what it does."""

    node: Node
    met: Callable[[Kept], bool]
    reason: str


@dataclass(frozen=True)
class Layer:
    """The channels that a layer takes and gives; an embedding takes none."""

    inputs: Axis | None
    outputs: Axis


Edit = Callable[[Kept], None]
"""Changes a node to what it has to be once channels are dropped."""


@dataclass
class Followed:
    """What was learnt from the graphs of one model."""

    units: Units
    tensors: dict[str, Axes]
    """Axes of each parameter and buffer."""
    needs: list[Need] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    layers: dict[str, Layer] = field(default_factory=dict)


class Step:
    """One operator call, as its rule sees it."""

    def __init__(self, node: Node, axes: Mapping[Node, Value], followed: Followed) -> None:
        self.node = node
        self.known = axes
        self.followed = followed
        self.units = followed.units

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
        place = self.names.index(name)
        if place < len(self.node.args):
            return self.node.args[place]
        declared = self.node.target._schema.arguments[place]  # type: ignore[union-attr]
        return self.node.kwargs.get(name, declared.default_value)

    def axes(self, name: str) -> Axes:
        """Axes of the tensor argument `name`; empty where there is none."""
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
        """The result's shape, the batch's size replaced by OPEN_SIZE."""
        return shape_of(self.node.meta["val"])

    def need(self, axis: Axis, reason: str) -> None:
        """Refuse the model if not all of `axis` is kept."""
        self.require(lambda kept: kept.all(axis), reason)

    def require(self, met: Callable[[Kept], bool], reason: str) -> None:
        """Refuse the model if `met` does not hold of what is kept."""
        self.followed.needs.append(Need(self.node, met, reason))

    def edit(self, name: str, value: Callable[[Kept], Any]) -> None:
        """Set the argument `name` to `value` once it is known what is kept."""
        place = self.names.index(name)

        def apply(kept: Kept) -> None:
            if place < len(self.node.args):
                self.node.update_arg(place, value(kept))
            else:
                self.node.update_kwarg(name, value(kept))

        self.followed.edits.append(apply)

    def resize(self, name: str, axes: Sequence[Axis]) -> None:
        """Keep the sizes in the argument `name`, one for each of `axes`, up to date."""
        given = list(self.argument(name))
        if len(given) != len(axes):
            for axis in axes:
                self.need(axis, "its sizes cannot be told apart")
            return

        def sizes(kept: Kept) -> list[Any]:
            return [
                kept.count(axis) if isinstance(size, int) and size >= 0 else size
                for size, axis in zip(given, axes, strict=True)
            ]

        for size, axis in zip(given, axes, strict=True):
            if isinstance(size, Node):
                self.need(axis, "it computes a size from the number of channels")
        self.edit(name, sizes)


Rule = Callable[[Step], Value]


def operator_name(node: Node) -> str:
    """Name of the ATen operator that `node` calls, without its overload."""
    return str(node.target._schema.name).removeprefix("aten::")  # type: ignore[union-attr]


def name_of(weight: object, node: Node) -> str:
    """The module that `weight` belongs to, else the one that calls the operator at `node`."""
    if isinstance(weight, Node) and weight.op == "get_attr":
        return str(weight.target).rpartition(".")[0]
    return module_of(node)


def shape_of(value: Tensor) -> tuple[int, ...]:
    """Shape of a recorded tensor, the batch's size replaced by OPEN_SIZE."""
    return tuple(number(size) for size in value.shape)


def number(size: int | torch.SymInt) -> int:
    """A size that may depend on the batch's."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, OPEN_SIZE)))


def untouched(value: object) -> Value:
    """Axes that stay as they are, for a recorded tensor or several."""
    if isinstance(value, Tensor):
        return tuple(map(fixed, shape_of(value)))
    if isinstance(value, list | tuple):
        return [axes for v in value if isinstance(axes := untouched(v), tuple)]
    return None


def unknown(step: Step) -> Value:
    """An operator without a rule works only where all channels it sees stay."""
    for node in step.node.all_input_nodes:
        for axis in step.of(node):
            if node.op == "get_attr":
                # Numbers of its own, as an LSTM's, would be dropped if its channels could be.
                step.units.compute(axis)
            step.need(axis, "no rule says what it does with channels")
    return untouched(step.node.meta.get("val"))


def is_fixed(axis: Axis, units: Units) -> bool:
    """Whether it is known by now that all of `axis` stays."""
    return bool(np.all(units.roots(axis) == FIXED))
