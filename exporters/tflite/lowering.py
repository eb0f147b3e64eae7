"""Lowers one traced ATen graph to one TFLite subgraph.

Each module of operators has a dict `FORMS` from ATen operator to the function that writes it.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import sympy
import torch
from torch import SymFloat, SymInt
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node
from torch.utils._sympy.functions import Max

from exporters.programs.loop_bodies import Body, stored
from exporters.programs.operator_support import suggest_alternative
from exporters.programs.program import ProgramSignature
from exporters.programs.source_lines import place_of_operator, place_of_type
from exporters.programs.tracing import Place
from exporters.tflite.constant_weights import FoldingSubgraph, merge_operators
from exporters.tflite.exposed_values import exposed_name
from exporters.tflite.flatbuffer import TYPES, Size, Subgraph, Tensor, open_size
from exporters.tflite.tensor_layouts import Layouts, UnsupportedError, Value
from profiles.errors import ExportError

LoweringRule = Callable[..., Any]
"""Takes the lowering and the arguments of an operator, with a `Value` for each tensor. It returns
one value per result of the operator."""

LoweringRules = dict[OpOverload[..., Any] | HigherOrderOperator, LoweringRule]
Number = bool | int | float
OPEN_SIZE = "it needs a fixed size, but a batch can have any size"
"""The reason why an operator along the batch axis has no TFLite form."""

ARITHMETIC: dict[Any, str] = {
    operator.add: "ADD",
    operator.sub: "SUB",
    operator.mul: "MUL",
    operator.truediv: "DIV",
    operator.neg: "SUB",
}
SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default)


class Lowering(Layouts):
    """The state of lowering one graph. `shape` and `dtype` describe the current node's result."""

    def __init__(
        self, graph: Subgraph, forms: "LoweringRules", signature: ProgramSignature
    ) -> None:
        super().__init__(graph)
        self.forms = forms
        self.signature = signature
        self.shape: tuple[Size, ...] = ()
        self.dtype = "float32"
        self.greater: dict[Value, tuple[Value, Value]] = {}  # comparisons with their operands
        self.rectified: set[int] = set()  # tensors without negative numbers
        self.rows: dict[int, list[Tensor]] = {}  # parts that a tensor was packed from
        self.values: dict[str, Value] = {}  # by name of the node

    def input(self, name: str, dtype: str, shape: Sequence[Size]) -> Tensor:
        """Add an input to the subgraph."""
        tensor = self.graph.tensor(dtype, shape, name=name)
        self.graph.inputs[name] = tensor
        if self.batch is None:
            self.batch = batch_of(self, tensor)
        return tensor

    def constant(self, values: torch.Tensor) -> Value:
        """Add a constant of the traced graph. Raises ExportError if TFLite lacks its type."""
        dtype_of(values, self.signature)
        return Value.plain(self.graph.constant(values.detach().contiguous().numpy()))

    def is_constant(self, value: Value) -> bool:
        """Whether `value` is a constant of the graph."""
        return self.graph.data[value.tensor.index] is not None

    def scalar(self, number: "Number | SymInt | SymFloat | Value", dtype: str) -> Value:
        """A number as a tensor without axes."""
        if isinstance(number, Value):
            return number
        return Value.plain(self.graph.constant(np.asarray(number, dtype)))

    def emit(
        self,
        code: str,
        inputs: Sequence[Tensor],
        shape: Sequence[Size],
        options: str | None = None,
        dtype: str | None = None,
        **settings: object,
    ) -> Tensor:
        """Add an operator. Its output has `shape`, and `dtype` or the type of the first input."""
        return self.graph.operator(
            code, inputs, dtype or inputs[0].dtype, shape, options, **settings
        )


def lower_signature(
    graph: GraphModule,
    signature: ProgramSignature,
    forms: LoweringRules,
    held: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Subgraph, dict[str, Place]]:
    """Lower a traced signature. The inputs in `held` become constants of the subgraph.

    Returns the subgraph, and a map from the name of a node to the place of its value: the tensor
    and its layout. Raises ExportError if an operator has no TFLite form.
    """
    check_forms(graph, forms, signature)
    kind = Subgraph if held is None else FoldingSubgraph
    lowering = Lowering(kind(signature.name), forms, signature)
    examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    inputs = [
        lowering.constant(held[port.name])
        if held is not None and port.name in held
        else Value.plain(lowering.input(port.name, dtype_of(value, signature), shape_of(value)))
        for port, value in zip(signature.inputs, examples, strict=True)
    ]
    results = lower(lowering, graph, inputs)
    finish(lowering, results)
    if held is not None:
        merge_operators(lowering.graph)
    subgraph, index = lowering.graph.pruned()
    computed = {n for _, operator in subgraph.operators for n in operator.outputs.tolist()}
    places = {
        name: Place(exposed_name(index[value.tensor.index]), value.order)
        for name, value in lowering.values.items()
        if index.get(value.tensor.index) in computed
    }
    return subgraph, places


def lower(lowering: Lowering, graph: GraphModule, inputs: Sequence[Value]) -> list[Value]:
    """Write the operators of all nodes of `graph` and return its results for `inputs`."""
    known: dict[Node, Any] = {}
    ahead = iter(inputs)
    results: list[Value] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(ahead)
        elif node.op == "get_attr":
            held = stored(graph, node.target)
            known[node] = held if isinstance(held, Body) else lowering.constant(held)
        elif node.op == "call_function":
            known[node] = call(lowering, node, known)
            if isinstance(known[node], Value):
                lowering.values[node.name] = known[node]
        else:
            results = [known[n] for n in node.args[0]]
    return results


def call(lowering: Lowering, node: Node, known: dict[Node, Any]) -> Any:
    """Write the operators of one node and return its value."""
    if node.target is operator.getitem:
        return known[cast(Node, node.args[0])][cast(int, node.args[1])]
    result = node.meta.get("val")
    if node.target in SIZES or isinstance(result, SymInt | SymFloat):
        return number_of(lowering, node, known)
    form = lowering.forms[cast(Any, node.target)]
    first = result[0] if isinstance(result, tuple | list) else result
    assert isinstance(first, torch.Tensor)
    lowering.shape, lowering.dtype = shape_of(first), dtype_of(first, lowering.signature)
    args, options = torch.fx.map_arg((node.args, node.kwargs), lambda n: known[n])
    name = target._schema.name if isinstance(target := node.target, OpOverload) else str(target)
    try:
        if any(known[source] is None for source in node.all_input_nodes):
            name = "aten::max_unpool"  # `node` only computes with the indices
            raise UnsupportedError("the indices of max pooling, which max unpooling reads")
        return form(lowering, *args, **options)
    except (
        UnsupportedError,
        TypeError,
    ) as error:  # sympy raises TypeError if a rule needs a fixed size
        signature = lowering.signature
        place = place_of_operator(signature.source, name)
        raise ExportError(
            "Signature {signature!r} uses {operator}{place} in a way that the TFLite export does "
            "not support: {reason}. Export with --format onnx, or use another layer.",
            code="export.unsupported-operator",
            signature=signature.name,
            operator=name,
            place=place,
            reason=str(error) if isinstance(error, UnsupportedError) else OPEN_SIZE,
        ) from error


def check_forms(graph: GraphModule, forms: LoweringRules, signature: ProgramSignature) -> None:
    """Raise ExportError for the first operator that `forms` does not contain."""
    for node in graph.graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or target in SIZES or target in forms:
            continue
        name = target._schema.name
        raise ExportError(
            "Signature {signature!r} needs the operator {operator}{place}, which has no TFLite "
            "form: {alternative}",
            code="export.unsupported-operator",
            signature=signature.name,
            operator=name,
            place=place_of_operator(signature.source, name),
            alternative=suggest_alternative(name),
        )


def number_of(lowering: Lowering, node: Node, known: dict[Node, Any]) -> Any:
    """Return the number that `node` computes from the batch size.

    A size stays symbolic. A float becomes a tensor.
    """
    result = node.meta["val"]
    if not isinstance(result, SymFloat):
        return size_of(result)
    if node.target is torch.sym_float:
        return Value.plain(as_float(lowering, size_of(cast(Node, node.args[0]).meta["val"])))
    operands = (0.0, *node.args)[-2:]  # -x is 0 - x
    first, second = (as_float(lowering, known[a] if isinstance(a, Node) else a) for a in operands)
    return Value.plain(
        lowering.emit(
            ARITHMETIC[node.target],
            [first, second],
            (),
            f"{ARITHMETIC[node.target].capitalize()}Options",
        )
    )


def as_float(lowering: Lowering, number: Any) -> Tensor:
    """Return `number` as a float32 tensor without axes.

    `number` may be a constant, a computed number, or a polynomial of the batch size or the larger
    one of two. Raises UnsupportedError for other functions of the batch size.
    """
    if isinstance(number, Value):
        return number.tensor
    if isinstance(number, float) or not open_size(number) or number.is_number:
        return lowering.graph.constant(np.asarray(number, np.float32))
    if isinstance(number, Max):  # as in the variance of a batch
        first, *others = (as_float(lowering, part) for part in number.args)
        for other in others:
            first = lowering.emit("MAXIMUM", [first, other], (), "MaximumMinimumOptions")
        return first
    (symbol,) = number.free_symbols
    if not number.is_polynomial(symbol):
        raise UnsupportedError("a number that depends on the number of samples and is no product")
    assert lowering.batch is not None
    batch = lowering.emit(
        "CAST", [lowering.reshape(lowering.batch, ())], (), "CastOptions", "float32"
    )
    total: Tensor | None = None
    # Horner's rule: coefficients come from the highest power to the constant.
    for factor in sympy.Poly(number, symbol).all_coeffs():
        if total is not None:
            total = lowering.emit("MUL", [total, batch], (), "MulOptions")
        term = lowering.graph.constant(np.asarray(float(factor), np.float32))
        if total is None:
            total = term
        elif factor != 0:
            total = lowering.emit("ADD", [total, term], (), "AddOptions")
    assert total is not None
    return total


def batch_of(lowering: Lowering, tensor: Tensor) -> Tensor | None:
    """The size of the batch axis of `tensor` as one int32. None if there is no batch axis."""
    axes = [axis for axis, size in enumerate(tensor.shape) if isinstance(size, sympy.Symbol)]
    if not axes:
        return None
    shape = lowering.emit(
        "SHAPE", [tensor], (len(tensor.shape),), "ShapeOptions", "int32", outType=TYPES["int32"]
    )
    ends = [lowering.integers([n]) for n in (axes[0], 1)]
    return lowering.emit("SLICE", [shape, *ends], (1,), "SliceOptions")


def integer_range(lowering: Lowering, count: Size) -> Tensor:
    """The numbers from 0 to `count` - 1 as int32."""
    if not open_size(count):
        return lowering.graph.constant(np.arange(int(count), dtype=np.int32))
    start, step = (lowering.graph.constant(np.asarray(n, np.int32)) for n in (0, 1))
    end = lowering.reshape(lowering.open_size(count), ())
    return lowering.emit("RANGE", [start, end, step], (count,), "RangeOptions")


def finish(lowering: Lowering, results: Sequence[Value]) -> None:
    """Name the outputs. Copy returned inputs and constants, and a value that is returned twice."""
    taken = {t.index for t in lowering.graph.inputs.values()}
    for port, value in zip(lowering.signature.outputs, results, strict=True):
        tensor = lowering.dense(value)
        constant = lowering.graph.data[tensor.index] is not None
        if tensor.index in taken or constant:
            zero = lowering.graph.constant(np.zeros((), tensor.dtype))
            # ADD has no option `copy`. It keeps two copies of the same tensor from being merged.
            tensor = lowering.graph.operator(
                "ADD", [tensor, zero], tensor.dtype, tensor.shape, "AddOptions", copy=port.name
            )
        taken.add(tensor.index)
        lowering.graph.outputs[port.name] = tensor


def size_of(size: int | SymInt) -> Size:
    """A size as an int, or as an expression of the batch."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


def shape_of(value: torch.Tensor) -> tuple[Size, ...]:
    """The shape of a traced tensor."""
    return tuple(size_of(n) for n in value.shape)


def dtype_of(value: torch.Tensor, signature: ProgramSignature) -> str:
    """The name of a traced tensor's type. Raises ExportError if the writer does not know it."""
    name = str(value.dtype).removeprefix("torch.")
    if name not in ("float32", "int64", "int32", "bool"):
        raise ExportError(
            "The model computes in {dtype}{place}, a type that operators of TFLite do not take. "
            "Write .int() in place of .byte(), .char() and .short(), or export with --format onnx.",
            code="export.unsupported-type",
            dtype=name,
            place=place_of_type(signature.source, value.dtype),
        )
    return name
