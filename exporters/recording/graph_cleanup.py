"""Brings a recorded graph into the form that families and writers expect."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from exporters.programs.recorded_graph import (
    attribute,
    is_impure,
    is_integer_attribute,
    writes_in_place,
    written_inputs,
)
from exporters.recording.functional_form import UNTRACKED
from exporters.recording.graph_constants import compute_in_float32, fold_double_constants
from exporters.recording.shared_tensors import first_names
from exporters.recurrence.dropout_between_layers import split_at_dropouts
from exporters.recurrence.recurrent_layers import RECURRENT

aten = torch.ops.aten
NO_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast
CHECKS = (aten._assert_tensor_metadata.default,)
"""Operators that only check a tensor's type, which is fixed in the graph."""
FILLED = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_strided.default: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
    aten.new_empty_strided.default: aten.new_zeros.default,
}
"""Operators that only reserve memory, each with the operator that makes zeros instead."""
STEEP = ("sqrt", "rsqrt", "log", "pow", "reciprocal")
"""Operators, by name, whose gradient may be infinite at zero."""
STRIDED = (aten.empty_strided.default, aten.new_empty_strided.default)


def use_first_names(graph: GraphModule, tensors: Mapping[str, Tensor]) -> None:
    """Let `graph` read each of the model's `tensors` by its first name.

    If a tensor has several names, torch records the last name. If the model reads a parameter from
    a Python list or dictionary, or from a module in a list or dictionary, torch records a constant.
    """
    read = graph.graph.find_nodes(op="get_attr")
    others = {name: attribute(graph, name) for name in constants_of(graph) if name not in tensors}
    first = first_names({**tensors, **others})
    for node in read:
        node.target = first.get(str(node.target), node.target)


def constants_of(graph: GraphModule) -> list[str]:
    """The names of the tensors that torch found in the model's own attributes."""
    names = [str(node.target) for node in graph.graph.find_nodes(op="get_attr")]
    return [name for name in names if isinstance(getattr(graph, name, None), Tensor)]


def clean_up(graph: GraphModule) -> None:
    """Remove guards, checks, batch counters, dropouts of rate 0 and empty parts of concatenations.

    Memory that the model reserves is filled with zeros. Zero states of recurrent layers get the
    type of the weights, so that the graph also runs in float64. Dropout between recurrent layers
    becomes a separate operator. Stochastic depth in the form of the library `transformers` becomes
    a random draw, as in other libraries.
    """
    fill_with_zeros(graph)
    draw_kept_paths(graph)
    # Go backwards, so that a node is erased before the nodes that it reads.
    for node in reversed(list(graph.graph.nodes)):
        if node.target in RECURRENT:
            retype_zeros(graph, node)
        if node.target is aten.dropout.default and node.args[1] == 0:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            continue
        if node.target is aten.cat.default:
            skip_empty(node)
        if node.target is aten.rms_norm.default:
            fix_eps(node)
        if node.target is aten.clamp.default:
            float_bounds(node)
        if node.target is aten.relu.default and any(is_steep(user) for user in node.users):
            select_positive(graph, node)
        if node.target is aten.linear.default:
            add_bias_of_vector(graph, node)
        guard = node.op == "call_module" and node.target == "_guards_fn"
        if guard or node.target in CHECKS or only_counts(graph, node):
            graph.graph.erase_node(node)
    split_at_dropouts(graph)
    fold_double_constants(graph)
    compute_in_float32(graph)
    # Batch norms stay even if nothing reads their output, because they update statistics.
    graph.graph.eliminate_dead_code(is_impure_node=is_impure)
    graph.recompile()


def is_steep(node: Node) -> bool:
    """Whether the gradient of the operator `node` may be infinite at zero."""
    return getattr(node.target, "__name__", "").partition(".")[0] in STEEP


def select_positive(graph: GraphModule, relu: Node) -> None:
    """Let the node `relu` select positive elements.

    The gradient of relu would be a product with a mask, and zero times infinity is not a number.
    """
    with graph.graph.inserting_before(relu):
        positive = graph.graph.call_function(aten.gt.Scalar, (relu.args[0], 0))
        positive.meta = {**relu.meta, "val": relu.meta["val"] > 0}
    relu.target, relu.args = aten.where.ScalarOther, (positive, relu.args[0], 0.0)


def fill_with_zeros(graph: GraphModule) -> None:
    """Replace memory that the model reserves, to fill it later, by tensors of zeros.

    In the graph, filling becomes a copy, and this copy would read the reserved memory. If a random
    draw fills the memory, nothing is changed, because draws do not read it.
    """
    for node in graph.graph.nodes:
        if node.target not in FILLED or all("bernoulli" in str(u.target) for u in node.users):
            continue
        if node.target in STRIDED:
            node.args = node.args[:-1]
        if node.target is aten.empty.memory_format:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
        node.target = FILLED[node.target]


def draw_kept_paths(graph: GraphModule) -> None:
    """Replace floor(rand + keep) by an equal random draw: 1 with the probability keep, else 0."""
    for floor in graph.graph.find_nodes(op="call_function", target=aten.floor.default):
        (added,) = floor.args
        if added.target is not aten.add.Tensor or added.kwargs or len(added.users) > 1:
            continue
        uniform, keep = added.args
        is_draw = isinstance(uniform, Node) and uniform.target is aten.rand.default
        if (
            not is_draw
            or len(uniform.users) > 1
            or not isinstance(keep, float)
            or not 0 < keep <= 1
        ):
            continue
        uniform.target = aten.empty.memory_format
        floor.target, floor.args = aten.bernoulli.p, (uniform, keep)


def inline_regions(graph: GraphModule) -> None:
    """Move operators under `torch.no_grad` and a disabled `torch.autocast` into `graph` itself.

    torch records such regions as separate graphs. The outputs of a region under `no_grad` are
    detached, except tensors of the model that the region changes in place.
    """
    for node in list(graph.graph.nodes):
        if node.target is NO_GRAD:
            enabled, region, *inputs = node.args
        elif node.target is AUTOCAST and node.args[2] is False:
            _, _, _, _, region, *inputs = node.args
            enabled = True
        else:
            continue
        inside = getattr(graph, region.target)
        inline_regions(inside)
        if not enabled:
            for write in filter(writes_in_place, inside.graph.nodes):
                write.meta[UNTRACKED] = True
        own = dict(zip(inside.graph.find_nodes(op="placeholder"), inputs, strict=True))
        with graph.graph.inserting_before(node):
            results = graph.graph.graph_copy(inside.graph, own)
            values = list(results) if isinstance(results, tuple | list) else [results]
            if not enabled:
                values = [v if is_own_tensor(v) else detached(graph, v) for v in values]
        for user in list(node.users):
            user.replace_all_uses_with(values[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)
        if not region.users:
            graph.graph.erase_node(region)


def is_own_tensor(value: Any) -> bool:
    """Whether `value` is a tensor of the model, or the result of a write into such a tensor."""
    while isinstance(value, Node) and writes_in_place(value):
        value = next(written_inputs(value))
    return isinstance(value, Node) and value.op == "get_attr"


def detached(graph: GraphModule, value: Any) -> Any:
    """Return a new node that detaches the tensor `value`. Other values are returned unchanged."""
    if not isinstance(value.meta.get("val"), Tensor):
        return value
    node = graph.graph.call_function(aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node


def skip_empty(node: Node) -> None:
    """Remove empty tensors (0,) from the concatenation `node`. Key caches start with these."""
    tensors: Any = node.args[0]
    full = [tensor for tensor in tensors if not is_empty(tensor.meta["val"])]
    if len(full) == 1:
        node.replace_all_uses_with(full[0])
    elif full:
        node.args = (full, *node.args[1:])


def is_empty(value: Tensor) -> bool:
    """Whether `value` has the shape (0,). Sizes that depend on values are not compared."""
    sizes = list(value.shape)
    return len(sizes) == 1 and isinstance(sizes[0], int) and sizes[0] == 0


def fix_eps(norm: Node) -> None:
    """If the root mean square norm `norm` has no `eps`, give it the `eps` of float32.

    By default, PyTorch uses the `eps` of the number type. So in float64, the same norm would give
    different results.
    """
    value, sizes, weight, eps = (*norm.args, None, None)[:4]
    if eps is None and "eps" not in norm.kwargs:
        norm.args = (value, sizes, weight, torch.finfo(torch.float32).eps)


def float_bounds(clamp: Node) -> None:
    """Convert the bounds of `clamp` to floats, like its tensor: ONNX requires one type for all."""
    if clamp.meta["val"].is_floating_point():
        value, *bounds = clamp.args
        clamp.args = value, *(float(b) if isinstance(b, int) else b for b in bounds)


def add_bias_of_vector(graph: GraphModule, linear: Node) -> None:
    """Add the bias of the layer `linear` in a separate node if its input is a vector (n,).

    PyTorch adds the bias in place to a view of the product. The gradient of such an addition needs
    `as_strided`.
    """
    value, weight, *bias = linear.args
    if not isinstance(value, Node) or value.meta["val"].dim() != 1 or not bias:
        return
    with graph.graph.inserting_after(linear):
        total = graph.graph.call_function(aten.add.Tensor, (linear, bias[0]))
    total.meta = dict(linear.meta)
    linear.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    linear.args = (value, weight)


def retype_zeros(graph: GraphModule, recurrent: Node) -> None:
    """Give the zero states of the layer `recurrent` the type of its weights instead of float32."""
    states, weights = recurrent.args[1:3]
    for zeros in states if isinstance(states, list | tuple) else [states]:
        if isinstance(zeros, Node) and zeros.target is aten.zeros.default:
            with graph.graph.inserting_before(zeros):
                twin = graph.graph.call_function(
                    aten.new_zeros.default,
                    (weights[0], zeros.args[0]),  # type: ignore[index]
                )
            twin.meta = dict(zeros.meta)
            zeros.replace_all_uses_with(twin)


def only_counts(graph: GraphModule, node: Node) -> bool:
    """Whether `node` adds to an integer buffer that only such additions read."""
    counts, counter = is_batch_counter(graph, node), node
    while counts and counter.op != "get_attr":
        counter = counter.args[0]  # type: ignore[assignment]
    readers = {**node.users, **counter.users}
    return counts and all(is_batch_counter(graph, reader) for reader in readers)


def is_batch_counter(graph: GraphModule, node: Node) -> bool:
    """Whether `node` adds to an integer buffer that counts batches, as in batch norms."""
    counted: Any = node.args[0] if node.args else None
    if node.target is aten.copy_.default:  # `self.count += 1` also assigns
        return is_integer_attribute(graph, counted) and is_batch_counter(graph, node.args[1])  # type: ignore[arg-type]
    if node.target not in (aten.add_.Tensor, aten.add.Tensor):
        return False
    # A module that runs twice in one pass counts twice: the second addition reads the result of the
    # first.
    return is_integer_attribute(graph, counted) or (
        isinstance(counted, Node) and is_batch_counter(graph, counted)
    )
