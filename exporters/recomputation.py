"""Cheap activations are computed again for the backward pass instead of being kept for it."""

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

CHEAP = {"Relu", "BatchNormalization"}
"""One pass over memory each. As our steps have it, BatchNormalization only scales and shifts."""


class RecomputeActivations(InPlacePass):
    """Before: each value is computed once.

    After: no cheap function of a value that the backward pass reads anyway stays alive for it; the
    nodes behind the loss read a second one. As it stands right behind the first in the file, ONNX
    Runtime, which sees to the last inputs first, runs it when it is needed.
    """

    def __init__(self, loss: str) -> None:
        """`loss` is the output that ends the forward pass."""
        super().__init__()
        self.loss = loss

    def call(self, model: ir.Model) -> PassResult:
        """Give the readers behind the loss chains of their own."""
        place = {node: number for number, node in enumerate(model.graph)}
        producers = (v.producer() for v in model.graph.outputs if v.name == self.loss)
        end = max((place[node] for node in producers if node is not None), default=len(place))
        forward = [node for node in place if place[node] < end]
        # From the last to the first, so that the end of a chain takes all of it along.
        chains = [
            (chain, late)
            for node in reversed(forward)
            if (late := late_readers(node, place, end)) and (chain := cheap_chain(node, place, end))
        ]
        for chain, late in chains:
            again = repeat(chain)
            for reader, index in late:
                reader.replace_input_with(index, again)
        return PassResult(model, bool(chains))


def late_readers(node: ir.Node, place: dict[ir.Node, int], end: int) -> list[tuple[ir.Node, int]]:
    """Who reads `node`'s output behind `end`, and as which input; none if nobody does before."""
    uses = [(use.node, use.idx) for use in node.outputs[0].uses()]
    late = [use for use in uses if place.get(use[0], 0) > end]
    return late if len(late) < len(uses) else []


def cheap_chain(node: ir.Node, place: dict[ir.Node, int], end: int) -> list[ir.Node]:
    """Nodes up to `node`, first to last, from a value that is alive behind `end`; [] if none is."""
    chain: list[ir.Node] = []
    while node.op_type in CHEAP:
        chain.insert(0, node)
        source = node.inputs[0]
        assert source is not None
        if any(place.get(reader, 0) > end for reader in source.consumers()):
            return chain
        producer = source.producer()
        if producer is None:
            break
        node = producer
    return []


def repeat(chain: list[ir.Node]) -> ir.Value:
    """A second output of `chain`; each of its nodes stands right behind the one it repeats."""
    value = chain[0].inputs[0]
    for node in chain:
        twin = ir.Node(
            node.domain,
            node.op_type,
            [value, *node.inputs[1:]],
            node.attributes.values(),
            num_outputs=len(node.outputs),
            name=f"{node.name}_again",
        )
        (first, *_), (result, *_) = node.outputs, twin.outputs
        result.name, result.shape, result.type = f"{first.name}_again", first.shape, first.type
        node.append(twin)
        value = result
    assert value is not None
    return value
