"""Builds a TFLite file: tensors, operators, constants and signatures.

Everything is stored in order of first use and nothing else is stored, so the same calls give the
same bytes.
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
"""Size of an axis; an expression of the batch if it is open."""

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
    calls: list[tuple[Any, "Subgraph"]] = field(default_factory=list)  # options, what runs
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    _constants: dict[object, Tensor] = field(default_factory=dict)
    _outputs: dict[object, list[Tensor]] = field(default_factory=dict)

    def tensor(
        self, dtype: str, shape: Sequence[Size], data: bytes | None = None, name: str = ""
    ) -> Tensor:
        """A new tensor; it is constant if it has `data`."""
        made = schema.TensorT()
        made.type = TYPES[dtype]
        # Runtimes read the open axes from the signature; the shape must hold some size for them.
        made.shape = np.asarray([1 if open_size(n) else n for n in shape], np.int32)
        if any(open_size(n) for n in shape):
            made.shapeSignature = np.asarray([-1 if open_size(n) else n for n in shape], np.int32)
        made.hasRank = True
        made.name = name or f"t{len(self.tensors)}"
        self.tensors.append(made)
        self.data.append(data)
        self.shapes.append(tuple(shape))
        return Tensor(len(self.tensors) - 1, dtype, tuple(shape))

    def constant(self, values: np.ndarray) -> Tensor:
        """A constant. Equal constants are stored once."""
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
        """The output of the operator `code`, of the type `dtype` and `shape`.

        `options` names the schema's options table, `settings` are its fields.
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
        """Like `operator`, for several outputs given by their types and shapes."""
        kinds = tuple((dtype, tuple(shape)) for dtype, shape in results)
        key = (code, tuple(t.index for t in inputs), kinds, tuple(settings.items()))
        # An open size can be large. Such a result is computed again instead of kept in memory.
        if key not in self._outputs or any(open_size(n) for _, shape in kinds for n in shape):
            outputs = [self.tensor(dtype, shape) for dtype, shape in kinds]
            made = schema.OperatorT()
            made.inputs = np.asarray([t.index for t in inputs], np.int32)
            made.outputs = np.asarray([t.index for t in outputs], np.int32)
            if options is not None:
                made.builtinOptionsType = getattr(schema.BuiltinOptions, options)
                made.builtinOptions = getattr(schema, f"{options}T")()
                for name, value in settings.items():
                    setattr(made.builtinOptions, name, value)
            self.operators.append((getattr(schema.BuiltinOperator, code), made))
            self._outputs[key] = outputs
        return self._outputs[key]

    def call(self, part: "Subgraph", inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of `part` for `inputs`: an IF whose two branches are both `part`.

        IF is TFLite's only operator that runs a subgraph on its caller's memory.
        """
        outputs = [self.tensor(t.dtype, t.shape) for t in part.outputs.values()]
        values = [self.constant(np.asarray(True)), *inputs]
        made = schema.OperatorT()
        made.inputs = np.asarray([t.index for t in values], np.int32)
        made.outputs = np.asarray([t.index for t in outputs], np.int32)
        made.builtinOptionsType = schema.BuiltinOptions.IfOptions
        made.builtinOptions = schema.IfOptionsT()
        self.operators.append((schema.BuiltinOperator.IF, made))
        self.calls.append((made.builtinOptions, part))
        return outputs

    def pruned(self) -> "tuple[Subgraph, dict[int, int]]":
        """A copy without the operators and tensors that no output needs.

        Returns the copy, and the index in it of each tensor that is left.
        """
        needed = {t.index for t in (*self.inputs.values(), *self.outputs.values())}
        operators = []
        for code, made in reversed(self.operators):
            if needed.intersection(made.outputs.tolist()):
                needed.update(made.inputs.tolist(), made.outputs.tolist())
                operators.append((code, made))
        place = {old: new for new, old in enumerate(sorted(needed))}
        kept = {id(made.builtinOptions) for _, made in operators}

        def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: Tensor(place[t.index], t.dtype, t.shape) for n, t in tensors.items()}

        def renumbered(made: Any) -> Any:
            twin = copy.copy(made)
            twin.inputs = np.asarray([place[i] for i in made.inputs], np.int32)
            twin.outputs = np.asarray([place[i] for i in made.outputs], np.int32)
            return twin

        copied = Subgraph(
            self.name,
            tensors=[copy.copy(self.tensors[i]) for i in sorted(needed)],
            operators=[(code, renumbered(made)) for code, made in reversed(operators)],
            data=[self.data[i] for i in sorted(needed)],
            shapes=[self.shapes[i] for i in sorted(needed)],
            inputs=moved(self.inputs),
            outputs=moved(self.outputs),
            calls=[(options, part) for options, part in self.calls if id(options) in kept],
        )
        return copied, place


def open_size(size: Size) -> bool:
    """Whether `size` depends on the batch."""
    return not isinstance(size, int)


def serialize(subgraphs: Mapping[str, Subgraph], description: str = "") -> bytes:
    """One TFLite file with a signature for each subgraph, by name."""
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
        signature(name, place, subgraph) for place, (name, subgraph) in enumerate(subgraphs.items())
    ]
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def with_parts(subgraphs: Iterable[Subgraph]) -> list[Subgraph]:
    """`subgraphs`, then the subgraphs that they call; sets the place of each in its calls."""
    everything = list(subgraphs)
    places: dict[int, int] = {}
    for subgraph in everything:  # the loop also reaches the parts that it appends
        for options, part in subgraph.calls:
            if id(part) not in places:
                places[id(part)] = len(everything)
                everything.append(part)
            options.thenSubgraphIndex = options.elseSubgraphIndex = places[id(part)]
    return everything


def packed(subgraph: Subgraph) -> Any:
    """The file's form of `subgraph`."""
    made = schema.SubGraphT()
    made.name = subgraph.name
    made.tensors = subgraph.tensors
    made.inputs = np.asarray([t.index for t in subgraph.inputs.values()], np.int32)
    made.outputs = np.asarray([t.index for t in subgraph.outputs.values()], np.int32)
    made.operators = [operator for _, operator in subgraph.operators]
    return made


def signature(name: str, place: int, subgraph: Subgraph) -> Any:
    """The file's entry for the signature `name`, whose subgraph is at `place`."""
    made = schema.SignatureDefT()
    made.signatureKey, made.subgraphIndex = name, place
    made.inputs = [tensor_map(n, t) for n, t in subgraph.inputs.items()]
    made.outputs = [tensor_map(n, t) for n, t in subgraph.outputs.items()]
    return made


def operator_code(code: int) -> Any:
    """The file's entry for one kind of operator."""
    made = schema.OperatorCodeT()
    # Readers use the larger of the two fields.
    made.builtinCode = code
    made.deprecatedBuiltinCode = min(code, NEWEST_OLD_CODE)
    made.version = VERSIONS.get(code, 1)
    return made


def buffer_of(data: bytes, buffers: list[Any], stored: dict[bytes, int]) -> int:
    """Place of `data` among the file's buffers. Equal data is stored once."""
    if data not in stored:
        made = schema.BufferT()
        made.data = np.frombuffer(data, np.uint8)
        stored[data] = len(buffers)
        buffers.append(made)
    return stored[data]


def tensor_map(name: str, tensor: Tensor) -> Any:
    """One named port of a signature."""
    made = schema.TensorMapT()
    made.name, made.tensorIndex = name, tensor.index
    return made
