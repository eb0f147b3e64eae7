"""Computes a sigmoid with high precision if its logarithm is taken, as in binary cross-entropy."""

import torch
from torch.fx import GraphModule, Node

from exporters.onnx.traced_passes.traced_nodes import add_before

aten = torch.ops.aten
LOGARITHMS = (aten.log.default, aten.log1p.default, aten.log2.default, aten.log10.default)
KEEPING = frozenset(
    getattr(aten, name)
    for name in (
        *("view", "reshape", "expand", "permute", "transpose", "squeeze", "unsqueeze", "clone"),
        *("slice", "select", "index", "gather", "cat", "stack", "constant_pad_nd", "_to_copy"),
        *("neg", "rsub", "sub", "add", "where", "clamp", "clamp_min", "clamp_max"),
        *("maximum", "minimum"),
    )
)
"""Operators that may pass on a probability p, as p or as 1 - p."""


def keep_small_probabilities(graph: GraphModule) -> None:
    """Replace sigmoid(x) by 1 / (1 + exp(-x)) if its logarithm is taken.

    The runtime's sigmoid has an absolute error of up to 1e-7. For x below -18 the result is 0, so
    the logarithm is infinite and the gradient of a cross-entropy is 0. 1 / (1 + exp(-x)) has a
    relative error of up to 1e-7, and takes the same time.
    """
    for node in graph.graph.find_nodes(op="call_function", target=aten.sigmoid.default):
        if takes_logarithm(node):
            negative = add_before(node, aten.neg.default, node.args[0])
            odds = add_before(node, aten.exp.default, negative)
            total = add_before(node, aten.add.Tensor, odds, 1.0)
            node.replace_all_uses_with(add_before(node, aten.reciprocal.default, total))


def takes_logarithm(probability: Node) -> bool:
    """Whether a logarithm reads `probability`, directly or after operators that only move it."""
    waiting, seen = [probability], {probability}
    while waiting:
        for user in waiting.pop().users:
            if user.target in LOGARITHMS:
                return True
            if getattr(user.target, "overloadpacket", None) in KEEPING and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False
