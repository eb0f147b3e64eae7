"""Cheap activations are computed again for the backward pass instead of being kept for it."""

import math

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

CHEAP = {"Relu": 1, "BatchNormalization": 1, "Add": 2}
"""How many of an operator's inputs can be large. Our BatchNormalization only scales and shifts."""
LIMIT = 6
"""Most nodes that are repeated for one value: two residual blocks' ends would be more."""


class RecomputeActivations(InPlacePass):
    """Before: each value is computed once.

    After: no value stays alive for the backward pass that at most LIMIT cheap nodes make from
    values that it reads anyway; the nodes behind the loss read a second one. As it stands right
    behind the first in the file, ONNX Runtime, which sees to a node's last inputs first, runs it
    when it is needed.
    """

    def __init__(self, loss: str) -> None:
        """`loss` is the output that ends the forward pass."""
        super().__init__()
        self.loss = loss

    def call(self, model: ir.Model) -> PassResult:
        """Give the nodes behind the loss values of their own."""
        place = {node: number for number, node in enumerate(model.graph)}
        producers = (v.producer() for v in model.graph.outputs if v.name == self.loss)
        end = max((place[node] for node in producers if node is not None), default=len(place))
        forward = [node for node in place if place[node] < end]
        behind = {node for node in place if place[node] > end}
        kept = {v for node in forward for v in node.outputs if behind.intersection(v.consumers())}
        dropped = []
        for node in forward:
            value = node.outputs[0]
            if value in kept and not behind.issuperset(value.consumers()):
                kept.remove(value)
                if cost(value, kept) <= LIMIT:
                    dropped.append(value)
                else:
                    kept.add(value)
        twins: dict[ir.Value, ir.Value] = {}
        for value in dropped:
            late = [use for use in value.uses() if use.node in behind]
            twin = repeated(value, kept, twins)
            for use in late:
                use.node.replace_input_with(use.idx, twin)
        return PassResult(model, bool(dropped))


def cost(value: ir.Value, kept: set[ir.Value]) -> float:
    """How many nodes make `value` from those that are `kept`; infinite if one is not cheap."""
    node = value.producer()
    if node is None or value in kept:
        return 0
    if node.op_type not in CHEAP:
        return math.inf
    return 1 + sum(cost(source, kept) for source in large_inputs(node))


def large_inputs(node: ir.Node) -> list[ir.Value]:
    """The inputs of a cheap node that can be as large as its output."""
    return [value for value in node.inputs[: CHEAP[node.op_type]] if value is not None]


def repeated(
    value: ir.Value,
    kept: set[ir.Value],
    twins: dict[ir.Value, ir.Value],
) -> ir.Value:
    """`value` if it is `kept`, else a second one, whose node stands right behind the first's."""
    node = value.producer()
    if node is None or value in kept:
        return value
    if value not in twins:
        large = [repeated(source, kept, twins) for source in large_inputs(node)]
        twin = ir.Node(
            node.domain,
            node.op_type,
            [*large, *node.inputs[len(large) :]],
            node.attributes.values(),
            num_outputs=len(node.outputs),
            name=f"node_{value.name}_again",
        )
        twins[value] = result = twin.outputs[0]
        result.name, result.shape, result.type = f"{value.name}_again", value.shape, value.type
        node.append(twin)
    return twins[value]
