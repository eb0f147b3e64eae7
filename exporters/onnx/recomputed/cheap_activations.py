"""Computes cheap activations again for the backward pass, instead of keeping them in memory."""

import math

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

CHEAP = {"Relu": 1, "HardSigmoid": 1, "BatchNormalization": 1, "Add": 2}
"""Cheap operators and the number of their inputs that can be large.

Our BatchNormalization only scales and shifts."""
LIMIT = 6
"""The most nodes that are repeated for one value. The ends of two residual blocks would need
more."""
AGAIN = "_again"
"""The suffix of the names of copies."""


class RecomputeActivations(InPlacePass):
    """Repeats cheap nodes so that fewer values stay alive until the backward pass.

    Before: each value is computed once.

    After: nodes after the loss read a second copy of a value if at most LIMIT cheap nodes compute
    it from values that the backward pass reads anyway.

    In the file, the node of a copy follows the original node directly. The copy still runs late,
    because ONNX Runtime does not follow the order of the file: it starts from the outputs, and
    visits the last inputs of each node first.
    """

    def __init__(self, loss: str) -> None:
        """Take the name of the output that ends the forward pass."""
        super().__init__()
        self.loss = loss

    def call(self, model: ir.Model) -> PassResult:
        """Give the nodes after the loss separate copies of cheap values."""
        number = {node: number for number, node in enumerate(model.graph)}
        producers = (v.producer() for v in model.graph.outputs if v.name == self.loss)
        end = max((number[node] for node in producers if node is not None), default=len(number))
        forward = [node for node in number if number[node] < end]
        behind = {node for node in number if number[node] > end}
        kept = {v for node in forward for v in node.outputs if behind.intersection(v.consumers())}
        dropped = []
        for node in forward:
            value = node.outputs[0]
            # A copy saves memory only if the forward pass reads the value as well.
            if value in kept and not behind.issuperset(value.consumers()):
                kept.remove(value)
                if cost(value, kept, LIMIT) <= LIMIT:
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


def cost(value: ir.Value, kept: set[ir.Value], most: float) -> float:
    """Return how many nodes compute `value` from `kept` values.

    If the number exceeds `most`, or if a node is not cheap, the search stops and the result is
    infinite. Without this limit, the search could take very long: in a chain of sums y + y, each
    sum doubles the number of paths.
    """
    node = value.producer()
    if node is None or value in kept:
        return 0
    if node.op_type not in CHEAP or most < 1:
        return math.inf
    nodes = 1.0
    for source in large_inputs(node):
        nodes += cost(source, kept, most - nodes)
    return nodes


def large_inputs(node: ir.Node) -> list[ir.Value]:
    """Inputs of a cheap node that can be as large as its output."""
    return [value for value in node.inputs[: CHEAP[node.op_type]] if value is not None]


def repeated(
    value: ir.Value,
    kept: set[ir.Value],
    twins: dict[ir.Value, ir.Value],
) -> ir.Value:
    """Return `value` if it is `kept`, else a copy whose node follows the original node."""
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
            name=f"node_{value.name}{AGAIN}",
        )
        twins[value] = result = twin.outputs[0]
        result.name, result.shape, result.type = f"{value.name}{AGAIN}", value.shape, value.type
        node.append(twin)
    return twins[value]
