"""Reads a recorded ATen graph: its input and output, the tensors that it reads, and its writes."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from profiles.errors import ModelError

aten = torch.ops.aten
MINIMUM_BATCH = 2
"""Smallest batch that a recorded graph takes; torch treats sizes 0 and 1 as constants."""


def input_node(graph: GraphModule) -> Node:
    """Find the node of the batch of samples.

    Args:
        graph: A recorded graph.

    Returns:
        Its only placeholder.

    Raises:
        ModelError: The model takes no input or several inputs.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    if len(nodes) != 1:
        raise ModelError(
            "The model takes {inputs} inputs; it must take one tensor.",
            code="model.wrong-inputs",
            inputs=len(nodes),
        )
    node = nodes[0]
    assert isinstance(node, Node)
    return node


def output_node(graph: GraphModule) -> Node:
    """Find the node of the returned tensor.

    Args:
        graph: A recorded graph.

    Returns:
        The node whose value the graph returns.

    Raises:
        ModelError: The model returns no tensor.
    """
    (returned,) = graph.graph.find_nodes(op="output")
    value = returned.args[0]
    # Recording turns the output into a tuple of one tensor.
    node = value[0] if isinstance(value, tuple | list) and len(value) == 1 else value
    if not isinstance(node, Node):
        raise ModelError(
            "The model returns no tensor. Return the tensor that the loss uses.",
            code="model.wrong-output",
        )
    return node


def attributes_with_gradient(graph: GraphModule, outputs: frozenset[int] | None = None) -> set[str]:
    """The parameters and buffers, by name, that get a gradient from the output of `graph`.

    If the output packs several outputs, `outputs` has the indices of the outputs that a loss takes.
    None means all outputs. Two kinds of tensors get no gradient (None in PyTorch, not zero):
    tensors that are not used, and tensors that reach the output only through `detach`,
    `torch.no_grad` or integers.
    """
    last = output_node(graph)
    reached, ahead = set[Node](), [last]
    if outputs is not None and last.target is aten.cat.default:
        packed = last.args[0]
        assert isinstance(packed, list | tuple)
        ahead = [node for number, node in enumerate(packed) if number in outputs]
    while ahead:
        node = ahead.pop()
        value = node.meta.get("val")
        whole = isinstance(value, Tensor) and not value.is_floating_point()
        if node in reached or whole or node.target is torch.ops.aten.detach.default:
            continue
        reached.add(node)
        ahead.extend(node.all_input_nodes)
    return {str(node.target) for node in reached if node.op == "get_attr"}


def attributes_read(graph: GraphModule) -> Iterator[str]:
    """List the parameters and buffers that `graph` reads.

    Args:
        graph: A recorded graph.

    Yields:
        Each name once, in order of first use.
    """
    # Recording lists all attributes at the start, so their order is not that of their use.
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    readers = graph.graph.find_nodes(op="get_attr")
    first = sorted(
        readers, key=lambda node: min((order[u] for u in node.users), default=len(order))
    )
    seen: set[str] = set()
    for node in first:
        if node.users and str(node.target) not in seen:
            seen.add(str(node.target))
            yield str(node.target)


def attribute(graph: GraphModule, name: str) -> Tensor:
    """The tensor that a `get_attr` node for `name` reads."""
    value: object = graph
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


def is_integer_attribute(graph: GraphModule, node: object) -> bool:
    """Whether `node` reads an integer buffer of the model."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return False
    return not attribute(graph, str(node.target)).is_floating_point()


def casts_to_integers(node: Node) -> bool:
    """Whether `node` converts float numbers to integers."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        return False
    read = (source.meta.get("val") for source in node.all_input_nodes)
    return any(isinstance(other, Tensor) and other.is_floating_point() for other in read)


def writes_in_place(node: Node) -> bool:
    """Whether `node` changes one of its inputs."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def written_inputs(node: Node) -> Iterator[object]:
    """Yield the inputs that `node` changes in place.

    For `add_` this is the first input. For `add` with `out=` it is the last input.
    """
    if writes_in_place(node):
        assert isinstance(node.target, torch._ops.OpOverload)
        for index, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[index] if index < len(node.args) else None
                yield node.kwargs.get(argument.name, given)


def keeps_new_value(node: Node) -> bool:
    """Whether `node` stores a new value of a buffer that stays in the model, such as an average.

    Recording stores each new value once, by `copy_`; see `recording/functional_form.py`.
    """
    written = node.args[0] if node.target is aten.copy_.default else None
    return isinstance(written, Node) and written.op == "get_attr"


def names_of_kept_values(graph: GraphModule) -> list[str]:
    """The names of the tensors of which `graph` stores new values, see `keeps_new_value`."""
    stored = (node.args[0] for node in graph.graph.nodes if keeps_new_value(node))
    return [str(written.target) for written in stored if isinstance(written, Node)]


def is_impure(node: Node) -> bool:
    """Whether `node` must stay in the graph even if no node reads it.

    Such nodes are the inputs, the output, and operators that change a tensor in place.
    """
    if node.op in ("placeholder", "output"):
        return True
    # A batch norm updates running statistics, although its schema does not say so.
    return node.target is aten.batch_norm.default or writes_in_place(node)


def module_of(node: Node) -> str:
    """Path of the innermost module that contains `node`. Empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""
