"""Cuts an ONNX file into pieces. Each piece computes one value from known values.

A piece runs in a separate session. If every piece is correct and reads the correct values, the file
is correct. So equal pieces, for example in equal layers, need to run only once.
"""

import hashlib
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper
from torch.fx import Node

from device_agent.runtime.onnx_runtime import open_model

Known = Callable[[str], Node | None]
"""Returns the node whose value a tensor of the file has, or None if this value is not known."""
CHOICE = "If"
"""The operator with which a form computes full batches in another way."""


@dataclass(frozen=True)
class Piece:
    """The part of a file that computes the tensor `output`.

    Attributes:
        output: The name of a tensor in the file.
        nodes: The indices of the file's nodes that compute `output`, in order.
        reads: The tensors that these nodes read. Each tensor has the value of a node of the traced
            graph.
        constants: Names of the constants that these nodes read.
        chooses: Whether a node computes full batches in another way than other batches.
    """

    output: str
    nodes: tuple[int, ...]
    reads: Mapping[str, Node]
    constants: tuple[str, ...]
    chooses: bool


class OnnxFile:
    """The nodes and constants of a serialized ONNX file.

    Nodes that only make other nodes wait are left out; see `onnx/state_in_place.py`.
    """

    def __init__(self, data: bytes) -> None:
        model = onnx.load_from_string(data)
        self.opsets, self.version = list(model.opset_import), model.ir_version
        self.constants: dict[str, NodeProto | TensorProto] = {}
        self.nodes: list[NodeProto] = []
        self.makers: dict[str, int] = {}
        self.constants.update((tensor.name, tensor) for tensor in model.graph.initializer)
        same: dict[str, str] = {}
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = same.get(name, name)
            if node.op_type == "Constant":
                self.constants[node.output[0]] = node
            elif node.op_type == "Where" and node.input[1] == node.input[2]:
                same[node.output[0]] = node.input[1]
            else:
                self.makers |= dict.fromkeys(node.output, len(self.nodes))
                self.nodes.append(node)
        self.reads = [list(dict.fromkeys(names_read(node))) for node in self.nodes]
        self._contents: dict[str, bytes] = {}

    @cached_property
    def numbers(self) -> dict[str, bytes]:
        """A number for each tensor. If numbers are equal, nodes compute the same value twice."""
        numbers: dict[str, bytes] = {}
        for node, reads in zip(self.nodes, self.reads, strict=True):
            read = [numbers.get(name) or self.content(name) for name in reads]
            for index, name in enumerate(node.output):
                numbers[name] = hashed(*operation(node, reads), *read, str(index).encode())
        return numbers

    def content(self, name: str) -> bytes:
        """A number for an input or a constant. Equal constants have equal numbers."""
        if name not in self._contents:
            constant = self.constants.get(name)
            if constant is None:
                self._contents[name] = b"input " + name.encode()
            elif isinstance(constant, TensorProto):
                array = onnx.numpy_helper.to_array(constant)
                self._contents[name] = hashed(repr((array.dtype, array.shape)).encode(), array)
            else:
                self._contents[name] = hashed(*operation(constant, []))
        return self._contents[name]

    def piece(self, output: str, known: Known) -> Piece:
        """The piece that computes `output`, which is a result of a node, from `known` values."""
        nodes, waiting = {self.makers[output]}, [self.makers[output]]
        reads: dict[str, Node] = {}
        constants: dict[str, None] = {}
        while waiting:
            for name in self.reads[waiting.pop()]:
                if name in self.constants:
                    constants[name] = None
                elif (node := known(name)) is not None:
                    reads[name] = node
                elif self.makers[name] not in nodes:
                    nodes.add(self.makers[name])
                    waiting.append(self.makers[name])
        chooses = any(self.nodes[number].op_type == CHOICE for number in nodes)
        return Piece(output, tuple(sorted(nodes)), reads, tuple(constants), chooses)

    def key(self, piece: Piece, reads: Mapping[str, bytes]) -> bytes:
        """A number for the computation of `piece`. `reads` has a number for each tensor read."""
        local = dict(reads)
        for number in piece.nodes:
            node, names = self.nodes[number], self.reads[number]
            values = [local.get(name) or self.content(name) for name in names]
            for index, name in enumerate(node.output):
                local[name] = hashed(*operation(node, names), *values, str(index).encode())
        return local[piece.output]

    def run(self, piece: Piece, values: Mapping[str, np.ndarray], batch: int) -> np.ndarray:
        """Compute the output of `piece` in the runtime.

        Args:
            piece: A piece of this file.
            values: The tensors that the piece reads, by name.
            batch: The number of samples. If the first axis of a tensor has this length, its size is
                left open, as in the file.
        """
        constants = [self.constants[name] for name in piece.constants]
        inputs = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(value.dtype),
                ["batch" if size == batch else size for size in value.shape[:1]]
                + list(value.shape[1:]),
            )
            for name, value in values.items()
        ]
        graph = helper.make_graph(
            [c for c in constants if isinstance(c, NodeProto)]
            + [without_outputs(self.nodes[number], values) for number in piece.nodes],
            "piece",
            inputs,
            [onnx.ValueInfoProto(name=piece.output)],
            [c for c in constants if isinstance(c, TensorProto)],
        )
        model: ModelProto = helper.make_model(
            graph, opset_imports=self.opsets, ir_version=self.version
        )
        session = open_model(model.SerializeToString(), 0)
        [value] = session.run([piece.output], dict(values))
        return np.asarray(value)


def without_outputs(node: NodeProto, names: Container[str]) -> NodeProto:
    """Return `node` with new names for the outputs that are in `names`.

    A piece may need one output of a node and read another output as a known value.
    """
    if not any(name in names for name in node.output):
        return node
    twin = NodeProto()
    twin.CopyFrom(node)
    twin.output[:] = [f"{name}_unread" if name in names else name for name in node.output]
    return twin


def names_read(node: NodeProto) -> Iterator[str]:
    """Yield the names of the tensors that `node` and the graphs inside it read."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            body = attribute.g
            own = {value.name for value in (*body.input, *body.initializer)}
            own |= {name for inner in body.node for name in inner.output}
            outputs = (value.name for value in body.output)
            inner_names = (name for inner in body.node for name in names_read(inner))
            yield from (name for name in (*inner_names, *outputs) if name not in own)


def operation(node: NodeProto, reads: list[str]) -> Iterator[bytes]:
    """Describe what `node` computes: operator, place of each input in `reads`, attributes."""
    yield f"{node.domain} {node.op_type}".encode()
    yield str([reads.index(name) if name else None for name in node.input]).encode()
    for attribute in sorted(node.attribute, key=lambda attribute: attribute.name):
        yield attribute.SerializeToString(deterministic=True)


def hashed(*parts: "bytes | np.ndarray") -> bytes:
    """A hash of `parts` in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part
        digest.update(b"%d " % len(part) if isinstance(part, bytes) else b"array ")
        digest.update(data)
    return digest.digest()
