"""Replaces the in-place writes of a recorded graph by new values, to cut the graph anywhere.

For example, `relu_(x)` changes x and every view of x. The new graph computes y = relu(x) instead.
Nodes that read x or a view of x after the write then read y or the corresponding view of y. A write
through a view becomes a new value of the viewed tensor: `x[:, 0] = v` becomes select_scatter(x, v,
1, 0).

A write into a buffer that is saved with the model, such as an average, also becomes a new value.
One `copy_` after the last write stores this value. No node after the `copy_` reads the buffer.

Recording keeps the storage of every value, so it is known exactly which nodes share memory.
"""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from exporters.programs.recorded_graph import writes_in_place, written_inputs

aten = torch.ops.aten
RESHAPES = (
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "contiguous",
    "alias",
    "detach",
    "to",
    "type_as",
)
"""Views that keep all elements in their order; `to` is such a view if it keeps the type."""
SWAPS = ("transpose", "t", "swapaxes", "swapdims", "numpy_T", "mT")
"""Views that are their own inverse."""
SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
"""Views of some elements, and the operators that write such a view into the whole tensor."""


UNTRACKED = "without gradient"
"""The key in a node's `meta` that marks operators under `torch.no_grad`."""


class NoFunctionalForm(Exception):  # noqa: N818 - users never see it
    """A write cannot be replaced by a new value."""


def make_functional(module: GraphModule, kept: Collection[str]) -> None:
    """Replace the in-place writes of `module`, but not writes into own tensors outside of `kept`.

    Args:
        module: A recorded graph. The graph stays unchanged if one of its writes has no functional
            form.
        kept: The names of the module's own tensors that may change: tensors that are saved but not
            trained.
    """
    for node in module.graph.find_nodes(op="call_function", target=aten.detach_.default):
        node.target = aten.detach.default  # changes no number of the constant
    copied, twins = Graph(), dict[Node, Node]()
    copied.output(copied.graph_copy(module.graph, twins))
    copied.output_node().meta = dict(module.graph.output_node().meta)
    writes = Writes(copied, kept)
    if not writes.pending:
        return
    try:
        writes.replace()
    except NoFunctionalForm:
        return
    copied.lint()
    copied.set_codegen(module.graph._codegen)
    module.graph = copied


class Writes:
    """Replaces the in-place writes of `graph`, from the first node to the last.

    The version of a memory is the number of writes into it so far. For each node, this class stores
    the node that now has the value, and the version of this value. If the memory has a newer
    version, views of the memory are computed again.

    Attributes:
        pending: The writes to replace.
    """

    def __init__(self, graph: Graph, kept: Collection[str]) -> None:
        self._graph = graph
        self._memory = {n: m for n in graph.nodes if (m := memory_of(n)) is not None}
        read = graph.find_nodes(op="get_attr")
        self._kept = {self._memory[n]: n for n in read if str(n.target) in kept}
        own = {self._memory.get(n) for n in read} - self._kept.keys()
        self.pending = [
            n for n in graph.nodes if writes_in_place(n) and self._memory.get(n) not in own
        ]
        # The inputs of each view or write, before any argument is replaced.
        self._viewed = {n: o for n in self._memory if (o := self._viewed_by(n)) is not None}
        self._versions = dict.fromkeys({self._memory.get(n) for n in self.pending}, 0)
        self._values: dict[Node, tuple[int, Node]] = {}

    def _viewed_by(self, node: Node) -> Node | None:
        """The tensor that `node` is a view of; for a part of a split, the whole tensor."""
        if node.op != "call_function":
            return None
        read: object = node.args[0] if node.args else None
        if writes_in_place(node):
            read = next(written_inputs(node))
        if node.target is operator.getitem and isinstance(read, Node) and read not in self._memory:
            read = read.args[0] if read.args else None
        same = isinstance(read, Node) and self._memory.get(read) == self._memory[node]
        return read if same and isinstance(read, Node) else None

    def replace(self) -> None:
        """Replace all writes. Raises NoFunctionalForm if one cannot be replaced."""
        owners = [
            m for n, m in self._memory.items() if m in self._versions and n not in self._viewed
        ]
        if len(owners) != len(self._versions) or None in self._versions:
            raise NoFunctionalForm  # two nodes share memory in an unknown way
        writes = set(self.pending)
        for node in list(self._graph.nodes):
            with self._graph.inserting_before(node):
                node.args = torch.fx.map_arg(node.args, self._current)
                node.kwargs = torch.fx.map_arg(node.kwargs, self._current)
                if node in writes:
                    self._write(node)
                elif (version := self._version(node)) is not None:
                    self._values[node] = version, node
        for memory, buffer in self._kept.items():
            self._store(memory, buffer)
        for node in reversed(self.pending):
            self._graph.erase_node(node)

    def _store(self, memory: int, buffer: Node) -> None:
        """Let the graph store the last value of `buffer` after the last write into it."""
        writes = [write for write in self.pending if self._memory[write] == memory]
        if not writes:
            return
        _, value = self._values[buffer]
        with self._graph.inserting_before(writes[-1]):
            value = self._call(writes[-1], aten.detach.default, (value,), buffer)
            self._call(writes[-1], aten.copy_.default, (buffer, value), buffer)

    def _version(self, node: Node) -> int | None:
        """The version of the memory of `node`; None if nothing writes to it."""
        return self._versions.get(self._memory.get(node))

    def _current(self, node: Node) -> Node:
        """The node that a reader of `node` must read now."""
        now = self._version(node)
        if now is None or node not in self._values:
            return node
        version, value = self._values[node]
        if version != now:
            value = self._current(self._viewed[node])
            if not writes_in_place(node):
                value = self._view_again(node, value)
            self._values[node] = now, value
        return value

    def _view_again(self, view: Node, viewed: Node) -> Node:
        """Add a node that applies the operator of `view` to `viewed`, and return it."""
        if view.target is operator.getitem:
            raise NoFunctionalForm  # PyTorch forbids writes into a tensor that was split
        twin = self._graph.node_copy(view, lambda node: node)
        twin.args = (viewed, *view.args[1:])
        return twin

    def _write(self, write: Node) -> None:
        """Replace `write`. From now on, its memory holds the result."""
        node, value = self._viewed[write], self._functional(write)
        if write.meta.get(UNTRACKED) and self._memory[write] in self._kept:
            value = self._call(write, aten.detach.default, (value,), write)
        changed = [(write, value), (node, value)]
        while node in self._viewed:
            viewed = self._viewed[node]
            if not writes_in_place(node):
                value = self._write_view(write, node, self._current(viewed), value)
            changed.append((viewed, value))
            node = viewed
        self._versions[self._memory[write]] += 1
        now = self._versions[self._memory[write]]
        self._values.update({node: (now, value) for node, value in changed})

    def _functional(self, write: Node) -> Node:
        """Add a node that computes the result of `write` and changes no input."""
        schema: Any = write.target._schema  # type: ignore[union-attr]
        name = schema.name.removeprefix("aten::")
        if schema.arguments[-1].is_out:
            return self._without_out(write)
        written, *rest = write.args
        if name == "copy_" and alike(rest[0], written):
            return rest[0]  # type: ignore[return-value]
        if name in ("copy_", "fill_") and isinstance(rest[0], Node):
            expanded = self._call(write, aten.expand_as.default, (rest[0], written), write)
            return self._call(write, aten.type_as.default, (expanded, written), write)
        if name == "fill_":
            return self._call(write, aten.full_like.default, (written, rest[0]), write)
        if name == "zero_":
            return self._call(write, aten.zeros_like.default, (written,), write)
        if write.target is aten.bernoulli_.float:
            share = rest[0] if rest else 0.5  # torch leaves out default arguments
            return self._call(write, aten.bernoulli.p, (written, share), write)
        changed = [
            argument.name for argument in schema.arguments if argument.alias_info is not None
        ]
        twin = without_write(write.target)
        if twin is None or len(changed) != 1:
            raise NoFunctionalForm
        return self._call(write, twin, write.args, write, write.kwargs)

    def _without_out(self, write: Node) -> Node:
        """Add a node that computes what `write` puts into its argument `out`."""
        twin, arguments = without_write(write.target), dict(write.kwargs)
        written = arguments.pop("out", None)
        if twin is None or not isinstance(written, Node):
            raise NoFunctionalForm
        value = self._call(write, twin, write.args, write, arguments)
        return self._call(write, aten.expand_as.default, (value, written), written)

    def _write_view(self, write: Node, view: Node, whole: Node, value: Node) -> Node:
        """Add a node that computes `whole` with the new `value` in the part that `view` shows."""
        if alike(value, whole) and view.target is aten.slice.Tensor:
            return value  # the view is the whole tensor, as in x[:]
        name = view.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
        if name in RESHAPES:
            return self._call(write, aten.reshape.default, (value, fixed_shape(whole)), whole)
        if view.target is aten.permute.default:
            order: Any = view.args[1]
            order = [dim % len(order) for dim in order]
            back = [order.index(dim) for dim in range(len(order))]
            return self._call(write, aten.permute.default, (value, back), whole)
        if name in SWAPS:
            return self._call(write, view.target, (value, *view.args[1:]), whole)
        if name == "movedim":
            arguments = (value, view.args[2], view.args[1])
            return self._call(write, view.target, arguments, whole)
        if name == "narrow":
            _, dim, start, length = view.args
            bounds = (start, start + length)  # type: ignore[operator]
            return self._call(
                write, aten.slice_scatter.default, (whole, value, dim, *bounds), whole
            )
        if view.target in SCATTERS:
            return self._call(write, SCATTERS[view.target], (whole, value, *view.args[1:]), whole)
        raise NoFunctionalForm

    def _call(self, write: Node, target: Any, args: Any, like: Node, kwargs: Any = None) -> Node:
        """Add a node with the module and line of `write`, and a value of the shape of `like`."""
        node = self._graph.call_function(target, args, kwargs)
        node.meta = {**write.meta, "val": like.meta["val"]}
        return node


def memory_of(node: Node) -> int | None:
    """An identifier of the memory of the tensor that `node` computes, or None."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def without_write(target: Any) -> Any:
    """The operator that computes the same as `target` without a write. None if there is none.

    The overload of this operator may have another name. For example, it is pow.Tensor_Scalar for
    pow_.Scalar.
    """
    schema = target._schema
    packet = getattr(aten, schema.name.removeprefix("aten::").removesuffix("_"), None)
    overloads = [] if packet is None else packet.overloads()
    same = schema.overload_name or "default"
    types = [str(argument.type) for argument in schema.arguments if not argument.is_out]
    for name in sorted(overloads, key=lambda name: name != same):
        twin = getattr(packet, name)
        if [str(argument.type) for argument in twin._schema.arguments] == types:
            return twin
    is_twin = same in overloads and not schema.arguments[-1].is_out
    return getattr(packet, same) if is_twin else None


def alike(first: object, second: object) -> bool:
    """Whether both are nodes of tensors with the same shape and type."""
    if not isinstance(first, Node) or not isinstance(second, Node):
        return False
    values = first.meta.get("val"), second.meta.get("val")
    shapes = [(*map(str, v.shape), v.dtype) for v in values if isinstance(v, Tensor)]
    return len(shapes) == 2 and shapes[0] == shapes[1]


def fixed_shape(node: Node) -> list[int]:
    """The shape of `node` with -1 for the size that depends on the batch."""
    shape = [-1 if isinstance(size, SymInt) else int(size) for size in node.meta["val"].shape]
    if shape.count(-1) > 1:
        raise NoFunctionalForm
    return shape
