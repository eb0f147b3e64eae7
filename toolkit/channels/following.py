"""A walk over a captured graph that gives every axis of every tensor its channels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from exporters.capture import Captured
from toolkit.channels.units import FIXED, Axes, Axis, Kept, Units, fixed

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
    """The channels that a convolution or linear layer takes and gives."""

    inputs: Axis
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

    def argument(self, name: str) -> Any:
        """The argument `name` as the graph has it, or its default."""
        for place, declared in enumerate(self.node.target._schema.arguments):  # type: ignore[union-attr]
            if declared.name == name:
                if place < len(self.node.args):
                    return self.node.args[place]
                return self.node.kwargs.get(name, declared.default_value)
        raise KeyError(name)

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
        names = [declared.name for declared in self.node.target._schema.arguments]  # type: ignore[union-attr]

        def apply(kept: Kept) -> None:
            if names.index(name) < len(self.node.args):
                self.node.update_arg(names.index(name), value(kept))
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


def follow(captured: Captured, rule_of: Callable[[Node], Rule]) -> Followed:
    """Follow the channels through both graphs of `captured`; `rule_of` finds operators' rules.

    Nothing is refused yet: that depends on what is kept (`Followed.needs`).
    """
    units = Units()
    tensors = {
        name: tuple(units.fresh(size) for size in captured.shape(name))
        for name in (*captured.parameters, *captured.buffers)
    }
    followed = Followed(units, tensors)
    for graph in (captured.training, captured.inference):
        walk(graph, followed, rule_of)
    return followed


def walk(graph: GraphModule, followed: Followed, rule_of: Callable[[Node], Rule]) -> None:
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


def is_fixed(axis: Axis, units: Units) -> bool:
    """Whether it is known by now that all of `axis` stays."""
    return bool(np.all(units.roots(axis) == FIXED))
