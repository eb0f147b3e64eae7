"""Computes the parts of a recorded graph that depend on constants alone.

The results replace the nodes: a device computes in float32, and a size may not depend on values.
"""

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, map_arg
from torch.fx.node import map_aggregate

from exporters.programs.recorded_graph import attribute, writes_in_place
from exporters.recording.graph_checks import NUMBERS

aten = torch.ops.aten
INDEXES = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
"""Operators that read or write at indexes, which are their second argument."""
OTHER_FLOATS = (torch.float64, torch.float16, torch.bfloat16)
BYTES = (torch.uint8, torch.int8, torch.int16)


def fold_double_constants(graph: GraphModule) -> None:
    """Replace values of other types by constants, if they depend only on float64 constants.

    A device computes in float32, and TFLite has neither float64 nor bytes. But code such as
    `torch.tensor(numpy_array).float()` needs float64 only to make a constant, and the causal mask
    `torch.from_numpy(np.triu(ones, 1).astype("uint8")) == 0` needs bytes only for this.
    """
    values = known_values(graph)
    insert_numbers(graph, values)
    index_by_positions(graph, values)
    known = {
        node: v
        for node, v in values.items()
        if isinstance(v, Tensor) and (selects(node) or is_short(node))
    }
    for node in list(graph.graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or any(map(writes_in_place, node.users)):
            continue
        if node.op == "get_attr" and is_wide(value):
            known[node] = attribute(graph, str(node.target))
        elif can_fold(node, known):
            call = cast("OpOverload[..., Tensor]", node.target)
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = call(*args, **kwargs)
    for number, (node, value) in enumerate(known.items()):
        of_complex = any(s in known and known[s].is_complex() for s in node.all_input_nodes)
        kept = value.is_complex() or (value.dtype in OTHER_FLOATS and not of_complex)
        if not kept and not node.users.keys() <= known.keys():
            name = f"folded_constant_{number}"
            graph.register_buffer(name, value.detach().clone(), persistent=False)
            with graph.graph.inserting_before(node):
                constant = graph.graph.get_attr(name)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)


def compute_in_float32(graph: GraphModule) -> None:
    """Convert float64 values to float32, because devices compute in float32."""

    def single(argument: Any) -> Any:
        if isinstance(argument, Tensor) and argument.dtype == torch.float64:
            return argument.to(torch.float32)
        return torch.float32 if argument is torch.float64 else argument

    for number, node in enumerate(graph.graph.nodes):
        value = node.meta.get("val")
        if node.op == "get_attr" and isinstance(value, Tensor) and value.dtype == torch.float64:
            name = f"single_constant_{number}"
            constant = attribute(graph, str(node.target)).detach().to(torch.float32)
            graph.register_buffer(name, constant, persistent=False)
            node.target = name
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), single)
        if value is not None:
            node.meta["val"] = map_aggregate(value, single)


def insert_numbers(graph: GraphModule, known: Mapping[Node, Any]) -> None:
    """Replace nodes that read numbers from constants, such as `.tolist()`, by the numbers."""
    for node in list(graph.graph.nodes):
        if node.target not in NUMBERS or node not in known:
            continue
        for user in list(node.users):
            numbers = {read: read for read in user.all_input_nodes} | {node: known[node]}
            user.args, user.kwargs = map_arg((user.args, user.kwargs), numbers.__getitem__)
        graph.graph.erase_node(node)


def index_by_positions(graph: GraphModule, known: Mapping[Node, Any]) -> None:
    """Replace constant masks in indexes, as in `x[:, ~eye]`, by the positions where they are true.

    With positions, the size of the result is fixed. With a mask, it would not be known.
    """
    for node in list(graph.graph.nodes):
        if node.target not in INDEXES or node in known:
            continue
        parts: list[Node | None] = []
        for part in cast("list[Node | None]", node.args[1]):
            mask = known.get(part) if part is not None else None
            if part is None or mask is None or mask.dtype != torch.bool:
                parts.append(part)
                continue
            for positions in mask.nonzero(as_tuple=True):
                name = f"positions_{node.name}_{len(parts)}"
                graph.register_buffer(name, positions, persistent=False)
                with graph.graph.inserting_before(node):
                    constant = graph.graph.get_attr(name)
                constant.meta = {**part.meta, "val": positions}
                parts.append(constant)
        node.args = (node.args[0], parts, *node.args[2:])


def known_values(graph: GraphModule) -> dict[Node, Any]:
    """Compute the nodes that depend only on constants, if a number or a size depends on them.

    Weights and other float tensors of the state are not constants here. Returns the value of each
    computed node.
    """
    needed = set[Node]()
    for node in reversed(graph.graph.nodes):
        needs = node in needed or node.target in NUMBERS or selects(node) or is_short(node)
        if needs and repeats_its_result(node):
            needed |= {node, *node.all_input_nodes}
        if node.target in INDEXES:
            needed |= {part for part in node.args[1] if part is not None}
    state, known = graph.state_dict(), dict[Node, Any]()
    for node in graph.graph.nodes:
        if node not in needed:
            continue
        if node.op == "get_attr":
            value = attribute(graph, str(node.target))
            if str(node.target) not in state or not value.is_floating_point():
                known[node] = value
        elif repeats_its_result(node) and all(source in known for source in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    return known


def is_short(node: Node) -> bool:
    """Whether `node` computes a tensor of float16, bfloat16 or bytes."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (*OTHER_FLOATS[1:], *BYTES)


def selects(node: Node) -> bool:
    """Whether the size of the result of `node` depends on values, as for `torch.unique`.

    If the values are constants, the size is fixed, but it is known only during recording.
    """
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.dynamic_output_shape in target.tags


def repeats_its_result(node: Node) -> bool:
    """Whether `node` calls an operator that draws no random numbers and writes to no tensor."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload):
        return False
    return not writes_in_place(node) and torch.Tag.nondeterministic_seeded not in target.tags


def can_fold(node: Node, known: dict[Node, Tensor]) -> bool:
    """Whether `node` computes one tensor from float64 constants, always with the same result."""
    if not repeats_its_result(node):
        return False
    value = node.meta["val"]
    sources = node.all_input_nodes
    is_fixed = all(isinstance(size, int) for size in value.shape)
    made_in_double = bool(sources) or is_wide(value)
    return is_fixed and made_in_double and all(source in known for source in sources)


def is_wide(value: Tensor) -> bool:
    """Whether `value` has a type that devices do not have: float64, bfloat16, bytes or complex."""
    return value.dtype in (*OTHER_FLOATS, *BYTES) or value.is_complex()
