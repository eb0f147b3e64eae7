"""Rewrites a graph into another form with the same inputs, outputs and results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir import Node, Value

from exporters.memory.liveness import in_place
from exporters.memory.static_shapes import with_shapes
from exporters.onnx.graph_reading import Dims, dims_of
from exporters.onnx.state_in_place import Order, know_shapes


def rewritten(graph: bytes, rewrite: Callable[[ir.Model], bool]) -> bytes | None:
    """Apply `rewrite` to the serialized ONNX `graph`; None if `rewrite` changes nothing.

    The outputs of the result can be written over old state if they can be in `graph`. Returns None
    if this is not possible.
    """
    model = ir.from_proto(with_shapes(onnx.load_from_string(graph)))
    know_shapes(model.graph)
    if not rewrite(model) or not keeps_order(model):
        return None
    result = ir.to_proto(model)
    del result.graph.value_info[:]
    return result.SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def keeps_order(model: ir.Model) -> bool:
    """Whether each output that overwrites an input is computed after all reads of this input."""
    order = Order(model.graph)
    old = {value.name: value for value in model.graph.inputs}
    new = {value.name: value for value in model.graph.outputs}
    return all(
        order.late_readers(old[name.removesuffix("+")], new[name]) == []
        for name in in_place(model.metadata_props)
    )


def typed_attribute(name: str, value: object) -> object:
    """Return a sequence of integers as an attribute, and any other value unchanged.

    onnx_ir infers the type of a sequence slowly, because it first compares the sequence with
    protocols.
    """
    integers = isinstance(value, Sequence) and all(isinstance(item, int) for item in value)
    return ir.AttrInt64s(name, value) if integers else value  # type: ignore[arg-type]


class GraphRewriting(ABC):
    """Rewrites one graph. The bodies of loops are not changed.

    Each form of a graph has a subclass. The names of new values begin with `prefix`.
    """

    prefix: str

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.constants: dict[object, Node] = {}
        self.views: dict[tuple[Value, tuple[int, ...]], Value] = {}
        self.named = 0

    @abstractmethod
    def gains_from(self, node: Node) -> bool:
        """Whether `node` is a reason to rewrite the graph."""

    @abstractmethod
    def convert(self, node: Node) -> bool:
        """Add nodes that compute `node` in this form. Returns False if `node` has to stay."""

    def keep(self, node: Node) -> None:
        """Keep `node` unchanged."""
        self.nodes.append(node)

    def rewrite(self) -> bool:
        """Rewrite the graph. If no node is a reason for it, change nothing and return False."""
        nodes = list(self.graph)
        if not any(self.gains_from(node) for node in nodes):
            return False
        results = set(self.graph.outputs)
        for node in nodes:
            if not results.isdisjoint(node.outputs) or not self.convert(node):
                self.keep(node)
        self.graph.remove(nodes)
        self.graph.extend([*self.constants.values(), *self.nodes])
        for node in nodes:
            if node.graph is None:  # it must not count as a reader of its inputs any more
                for index in range(len(node.inputs)):
                    node.replace_input_with(index, None)
        return True

    def add(
        self,
        operator: str,
        inputs: Sequence[Value | None],
        attributes: Mapping[str, object] | None = None,
        *,
        shape: Dims | ir.Shape | None,
        dtype: ir.DataType | None = ir.DataType.FLOAT,
        domain: str = "",
    ) -> Value:
        """Add a node and return its output."""
        typed = {name: typed_attribute(name, given) for name, given in (attributes or {}).items()}
        node = ir.node(operator, inputs, typed, domain=domain)  # type: ignore[arg-type]
        (value,) = node.outputs
        assert dtype is not None
        value.name, value.type = self.new_name(), ir.TensorType(dtype)
        value.shape = ir.Shape(shape) if isinstance(shape, tuple) else shape
        self.nodes.append(node)
        return value

    def new_name(self) -> str:
        """A name that no other value has."""
        self.named += 1
        return f"{self.prefix}_{self.named - 1}"

    def constant(self, value: Sequence[int] | np.ndarray) -> Value:
        """Return a constant of integers or an array. Equal constants are added once."""
        array = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            node = ir.node("Constant", [], {"value": ir.tensor(array)})
            (output,) = node.outputs
            output.name = f"{self.prefix}_constant_{len(self.constants)}"
            output.shape = ir.Shape(array.shape)
            output.dtype = ir.DataType.from_numpy(array.dtype)
            self.constants[key] = node
        return self.constants[key].outputs[0]

    def reshaped(self, value: Value, *shape: int, dims: Dims | ir.Shape | None = None) -> Value:
        """Reshape `value`. If one size of `shape` is -1, `dims` has the resulting shape."""
        known = dims or tuple(size if size >= 0 else None for size in shape)
        given = self.constant(shape)
        maker = value.producer()
        if maker is not None and maker.op_type == "Reshape" and maker.inputs[0] is not None:
            value = maker.inputs[0]  # no reshape of a reshape
        if value.shape == known or dims_of(value) == shape:
            return value
        if (value, shape) not in self.views:
            self.views[value, shape] = self.add(
                "Reshape", [value, given], shape=known, dtype=value.dtype
            )
        return self.views[value, shape]

    def permuted(self, value: Value, *axes: int) -> Value:
        """Permute the axes of `value` to this order."""
        old = dims_of(value)
        shape = tuple(old[axis] for axis in axes)
        return self.add("Transpose", [value], {"perm": axes}, shape=shape)

    def padded(self, value: Value, *pads: int) -> Value:
        """Pad `value` with zeros. `pads` has the widths before each axis, then after each axis."""
        if not any(pads):
            return value
        sizes = dims_of(value)
        around = zip(sizes, pads[: len(sizes)], pads[len(sizes) :], strict=True)
        shape = tuple(None if size is None else size + sum(more) for size, *more in around)
        return self.add("Pad", [value, self.constant(pads)], shape=shape)

    def replaced(self, value: Value, by: Value) -> bool:
        """Replace `value` by the value `by`."""
        by.name = value.name
        value.replace_all_uses_with(by)
        return True
