"""Computes what a model computes from float64 constants alone, such as NumPy arrays, once."""

from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, map_arg

from exporters.programs.recorded_graph import attribute, writes_in_place


def fold_double_constants(graph: GraphModule) -> None:
    """Replace values in other types that depend on float64 constants alone by constants.

    A device computes in float32, and TFLite has no float64. Code such as
    `torch.tensor(numpy_array).float()` needs it only for a constant.
    """
    known: dict[Node, Tensor] = {}
    for node in list(graph.graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or any(map(writes_in_place, node.users)):
            continue
        if node.op == "get_attr" and value.dtype == torch.float64:
            known[node] = attribute(graph, str(node.target))
        elif can_fold(node, known):
            call = cast("OpOverload[..., Tensor]", node.target)
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = call(*args, **kwargs)
    for number, (node, value) in enumerate(known.items()):
        if value.dtype != torch.float64 and not node.users.keys() <= known.keys():
            name = f"folded_constant_{number}"
            graph.register_buffer(name, value.detach().clone(), persistent=False)
            with graph.graph.inserting_before(node):
                constant = graph.graph.get_attr(name)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)


def can_fold(node: Node, known: dict[Node, Tensor]) -> bool:
    """Whether `node` computes one tensor from float64 constants, and always the same one."""
    target, value = node.target, node.meta["val"]
    if not isinstance(target, OpOverload) or writes_in_place(node):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    sources = node.all_input_nodes
    is_fixed = all(isinstance(size, int) for size in value.shape)
    made_in_double = bool(sources) or value.dtype == torch.float64
    return is_fixed and made_in_double and all(source in known for source in sources)
