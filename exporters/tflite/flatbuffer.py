"""Builds a TFLite file: tensors, operators, constants and signatures.

All parts are stored in the order of their first use, so the same calls give the same bytes.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import flatbuffers
import numpy as np
import sympy
from ai_edge_litert import schema_py_generated as schema

Size: TypeAlias = int | sympy.Expr
"""The size of an axis: an integer, or an expression of the batch size."""

TYPES = {
    "float32": schema.TensorType.FLOAT32,
    "int64": schema.TensorType.INT64,
    "int32": schema.TensorType.INT32,
    "bool": schema.TensorType.BOOL,
}
SCHEMA_VERSION = 3
IDENTIFIER = b"TFL3"
NEWEST_OLD_CODE = 127
"""Operator codes above this do not fit the format's first, one-byte field."""
VERSIONS = {schema.BuiltinOperator.BROADCAST_TO: 2}
"""The first version of an operator that runtimes know, if it is not 1."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a subgraph: its index, type and shape."""

    index: int
    dtype: str
    shape: tuple[Size, ...]


@dataclass
class Subgraph:
    """One signature's graph while it is being built."""

    name: str
    tensors: list[Any] = field(default_factory=list)
    operators: list[tuple[int, Any]] = field(default_factory=list)
    data: list[bytes | None] = field(default_factory=list)
    shapes: list[tuple[Size, ...]] = field(default_factory=list)
    calls: list[tuple[Any, "Subgraph"]] = field(default_factory=list)  # options, called subgraph
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    _constants: dict[object, Tensor] = field(default_factory=dict)
    _outputs: dict[object, list[Tensor]] = field(default_factory=dict)

    def tensor(
        self, dtype: str, shape: Sequence[Size], data: bytes | None = None, name: str = ""
    ) -> Tensor:
        """Add a tensor, which is a constant if it has `data`."""
        table = schema.TensorT()
        table.type = TYPES[dtype]
        # Runtimes read open sizes from `shapeSignature`; `shape` needs any size for them.
        table.shape = np.asarray([1 if open_size(n) else n for n in shape], np.int32)
        if any(open_size(n) for n in shape):
            table.shapeSignature = np.asarray([-1 if open_size(n) else n for n in shape], np.int32)
        table.hasRank = True
        table.name = name or f"t{len(self.tensors)}"
        self.tensors.append(table)
        self.data.append(data)
        self.shapes.append(tuple(shape))
        return Tensor(len(self.tensors) - 1, dtype, tuple(shape))

    def constant(self, values: np.ndarray) -> Tensor:
        """Add a constant. Equal constants are stored once."""
        key = (values.dtype.name, values.shape, values.tobytes())
        if key not in self._constants:
            self._constants[key] = self.tensor(values.dtype.name, values.shape, values.tobytes())
        return self._constants[key]

    def operator(
        self,
        code: str,
        inputs: Sequence[Tensor],
        dtype: str,
        shape: Sequence[Size],
        options: str | None = None,
        **settings: object,
    ) -> Tensor:
        """Add the operator `code`, and return its output with the type `dtype` and `shape`.

        `options` is the name of the options table in the schema. `settings` are the fields of this
        table.
        """
        return self.several(code, inputs, [(dtype, shape)], options, **settings)[0]

    def several(
        self,
        code: str,
        inputs: Sequence[Tensor],
        results: Sequence[tuple[str, Sequence[Size]]],
        options: str | None = None,
        **settings: object,
    ) -> list[Tensor]:
        """Add an operator with several outputs, whose types and shapes are in `results`."""
        kinds = tuple((dtype, tuple(shape)) for dtype, shape in results)
        key = (code, tuple(t.index for t in inputs), kinds, tuple(settings.items()))
        # A result with an open size can be large, so it is computed again instead of kept in
        # memory.
        if key not in self._outputs or any(open_size(n) for _, shape in kinds for n in shape):
            outputs = [self.tensor(dtype, shape) for dtype, shape in kinds]
            operator = schema.OperatorT()
            operator.inputs = np.asarray([t.index for t in inputs], np.int32)
            operator.outputs = np.asarray([t.index for t in outputs], np.int32)
            if options is not None:
                operator.builtinOptionsType = getattr(schema.BuiltinOptions, options)
                operator.builtinOptions = getattr(schema, f"{options}T")()
                for name, value in settings.items():
                    setattr(operator.builtinOptions, name, value)
            self.operators.append((getattr(schema.BuiltinOperator, code), operator))
            self._outputs[key] = outputs
        return self._outputs[key]

    def call(self, part: "Subgraph", inputs: Sequence[Tensor]) -> list[Tensor]:
        """Add an IF with `part` as both branches. Return the outputs of `part` for `inputs`.

        IF is TFLite's only operator that runs a subgraph on its caller's memory.
        """
        outputs = [self.tensor(t.dtype, t.shape) for t in part.outputs.values()]
        values = [self.constant(np.asarray(True)), *inputs]
        operator = schema.OperatorT()
        operator.inputs = np.asarray([t.index for t in values], np.int32)
        operator.outputs = np.asarray([t.index for t in outputs], np.int32)
        operator.builtinOptionsType = schema.BuiltinOptions.IfOptions
        operator.builtinOptions = schema.IfOptionsT()
        self.operators.append((schema.BuiltinOperator.IF, operator))
        self.calls.append((operator.builtinOptions, part))
        return outputs

    def pruned(self) -> "tuple[Subgraph, dict[int, int]]":
        """Copy the subgraph without the operators and tensors that no output needs.

        Returns the copy, and a map from the old index to the new index of each copied tensor.
        """
        needed = {t.index for t in (*self.inputs.values(), *self.outputs.values())}
        operators = []
        for code, operator in reversed(self.operators):
            if needed.intersection(operator.outputs.tolist()):
                needed.update(operator.inputs.tolist(), operator.outputs.tolist())
                operators.append((code, operator))
        index = {old: new for new, old in enumerate(sorted(needed))}
        kept = {id(operator.builtinOptions) for _, operator in operators}

        def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: Tensor(index[t.index], t.dtype, t.shape) for n, t in tensors.items()}

        def renumbered(operator: Any) -> Any:
            twin = copy.copy(operator)
            twin.inputs = np.asarray([index[i] for i in operator.inputs], np.int32)
            twin.outputs = np.asarray([index[i] for i in operator.outputs], np.int32)
            return twin

        copied = Subgraph(
            self.name,
            tensors=[copy.copy(self.tensors[i]) for i in sorted(needed)],
            operators=[(code, renumbered(operator)) for code, operator in reversed(operators)],
            data=[self.data[i] for i in sorted(needed)],
            shapes=[self.shapes[i] for i in sorted(needed)],
            inputs=moved(self.inputs),
            outputs=moved(self.outputs),
            calls=[(options, part) for options, part in self.calls if id(options) in kept],
        )
        return copied, index


def open_size(size: Size) -> bool:
    """Whether `size` depends on the batch."""
    return not isinstance(size, int)


def serialize(subgraphs: Mapping[str, Subgraph], description: str = "") -> bytes:
    """Write a TFLite file with a signature for each of the `subgraphs`, by name."""
    everything = with_parts(subgraphs.values())
    # Sorted, because the order of a set would change the bytes of the file.
    codes = sorted({code for subgraph in everything for code, _ in subgraph.operators})
    model = schema.ModelT()
    model.version = SCHEMA_VERSION
    model.description = description
    model.operatorCodes = [operator_code(code) for code in codes]
    model.buffers = [schema.BufferT()]  # by convention the first one is empty
    stored: dict[bytes, int] = {}
    model.subgraphs = []
    for subgraph in everything:
        for tensor, data in zip(subgraph.tensors, subgraph.data, strict=True):
            tensor.buffer = 0 if data is None else buffer_of(data, model.buffers, stored)
        for code, operator in subgraph.operators:
            operator.opcodeIndex = codes.index(code)
        model.subgraphs.append(packed(subgraph))
    model.signatureDefs = [
        signature(name, index, subgraph) for index, (name, subgraph) in enumerate(subgraphs.items())
    ]
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def with_parts(subgraphs: Iterable[Subgraph]) -> list[Subgraph]:
    """List `subgraphs`, then the subgraphs that they call.

    Each call gets the index of its subgraph in this list.
    """
    everything = list(subgraphs)
    indices: dict[int, int] = {}
    for subgraph in everything:  # the loop also reaches the parts that it appends
        for options, part in subgraph.calls:
            if id(part) not in indices:
                indices[id(part)] = len(everything)
                everything.append(part)
            options.thenSubgraphIndex = options.elseSubgraphIndex = indices[id(part)]
    return everything


def packed(subgraph: Subgraph) -> Any:
    """The schema's table for `subgraph`."""
    table = schema.SubGraphT()
    table.name = subgraph.name
    table.tensors = subgraph.tensors
    table.inputs = np.asarray([t.index for t in subgraph.inputs.values()], np.int32)
    table.outputs = np.asarray([t.index for t in subgraph.outputs.values()], np.int32)
    table.operators = [operator for _, operator in subgraph.operators]
    return table


def signature(name: str, index: int, subgraph: Subgraph) -> Any:
    """The schema's table for the signature `name`, whose subgraph is at `index`."""
    table = schema.SignatureDefT()
    table.signatureKey, table.subgraphIndex = name, index
    table.inputs = [tensor_map(n, t) for n, t in subgraph.inputs.items()]
    table.outputs = [tensor_map(n, t) for n, t in subgraph.outputs.items()]
    return table


def operator_code(code: int) -> Any:
    """The schema's table for one kind of operator."""
    table = schema.OperatorCodeT()
    # Readers use the larger of the two fields.
    table.builtinCode = code
    table.deprecatedBuiltinCode = min(code, NEWEST_OLD_CODE)
    table.version = VERSIONS.get(code, 1)
    return table


def buffer_of(data: bytes, buffers: list[Any], stored: dict[bytes, int]) -> int:
    """The index of `data` in the file's `buffers`. If needed, `data` is added to the buffers."""
    if data not in stored:
        table = schema.BufferT()
        table.data = np.frombuffer(data, np.uint8)
        stored[data] = len(buffers)
        buffers.append(table)
    return stored[data]


def tensor_map(name: str, tensor: Tensor) -> Any:
    """The schema's table for one named port of a signature."""
    table = schema.TensorMapT()
    table.name, table.tensorIndex = name, tensor.index
    return table
