"""Compares each operator of an ONNX file and of its other forms with PyTorch in float64.

A file is cut into pieces. The traced graph gives the values that a piece reads. The piece runs in
the runtime, and the same operators run in float64 on the same values. If an equal piece was
compared before, the piece is left out.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from device_agent.formats.graph_forms import BLOCKS, blocked_form
from exporters.onnx.forms.blocked_values import BLOCKED
from exporters.onnx.recomputed.cheap_activations import AGAIN
from exporters.onnx.recomputed.forward_pass import REPEATED
from exporters.programs.recorded_graph import attribute
from exporters.programs.tracing import TracedGraph
from exporters.runtime_graph import Graph
from exporters.verification.graph_values import Cone, Values, cone_of
from exporters.verification.onnx_pieces import OnnxFile, Piece, hashed
from exporters.verification.operators import Comparison

COPIES = re.compile(rf"({REPEATED}|{AGAIN})+$")
"""The end of the names of tensors that a file computes more than once."""
BLOCK = {blocked_form(block): block for block in BLOCKS}
"""The number of channels in a block of each blocked form."""


class Part(NamedTuple):
    """A piece of a file, and the operators of the traced graph that compute the same value."""

    piece: Piece
    cone: Cone


class ComparedFile:
    """A file of a graph, with pieces for the values that it shares with the traced graph.

    To save memory, a file may compute a value several times. Each of these computations has its own
    piece.

    Attributes:
        form: The form in the file. None for the plain graph.
        parts: The pieces for each node of the traced graph whose value the file computes. Each
            piece reads values that the file shares with the traced graph.
    """

    def __init__(
        self,
        graph: Graph,
        form: str | None,
        traced: TracedGraph,
        inputs: Mapping[str, Node],
        order: Mapping[Node, int],
        full: "FullBatch",
    ) -> None:
        """Find the pieces of a file.

        Args:
            graph: The graph.
            form: One of its forms, or None.
            traced: The traced graph of both.
            inputs: The inputs of the traced graph by name.
            order: The order in which the tensors of the traced graph are computed.
            full: A full batch. Some pieces compute full batches in another way.
        """
        self.form = form
        self.file = OnnxFile(graph.data if form is None else graph.forms[form].data)
        self._nodes = {name: node for name, node in inputs.items() if name not in graph.held}
        self._blocked = set[str]()
        self._order = order
        places = {
            place.name: node
            for node in order
            if (place := traced.places.get(node.name)) is not None
        }
        for name in self.file.makers:
            if name not in places:
                plain = name.removesuffix(BLOCKED)
                node = places.get(plain) or places.get(COPIES.sub("", plain))
                if name != plain and node is not None:
                    self._blocked.add(name)
            else:
                node = places[name]
            if node is not None:
                self._nodes[name] = node
        self._known_nodes = set(self._nodes.values())
        self._names: dict[Node, list[str]] = {}
        for name, node in self._nodes.items():
            if name in self.file.numbers:
                self._names.setdefault(node, []).append(name)
        self._twins = {
            self.file.numbers[name]: name
            for name, node in self._nodes.items()
            if node.op != "placeholder"
        }
        number = {node: index for index, node in enumerate(traced.module.graph.nodes)}
        self.parts: dict[Node, list[Part]] = {}
        for name, node in self._nodes.items():
            if node.op != "placeholder":
                piece = self.file.piece(name, partial(self._known, node))
                is_known: Callable[[Node], bool] = self._known_nodes.__contains__
                if piece.chooses:
                    piece = self.file.piece(name, partial(self._repeatable, node, full))
                    is_known = partial(self._is_repeatable, full)
                cone = cone_of(node, is_known, number)
                self.parts.setdefault(node, []).append(Part(self._aligned(piece, cone), cone))

    def _same(self, read: str) -> str | None:
        """A tensor with the value of `read` that belongs to a traced node, or None."""
        return read if read in self._nodes else self._twins.get(self.file.numbers.get(read, b""))

    def _known(self, node: Node, read: str) -> Node | None:
        """The node with the value of the tensor `read`, if it is computed before `node`."""
        same = self._same(read)
        if same is None:
            return None
        known = self._nodes[same]
        if known.op == "placeholder":
            return known
        return known if self._order[known] < self._order[node] else None

    def _repeatable(self, node: Node, full: "FullBatch", read: str) -> Node | None:
        """Like `_known`, but return None also if the samples of the value cannot be repeated."""
        known = self._known(node, read)
        return known if known is None or full.has_samples_apart(known) else None

    def _is_repeatable(self, full: "FullBatch", node: Node) -> bool:
        """Whether the file has the value of `node`, and its samples can be repeated."""
        return node in self._known_nodes and full.has_samples_apart(node)

    def _aligned(self, piece: Piece, cone: Cone) -> Piece:
        """Return `piece` so that it reads the same nodes as `cone`, as far as possible.

        The file may compute the same value for two nodes. If one of these nodes is a leaf of `cone`
        and `piece` reads the other node, the returned piece reads the leaf.
        """
        numbers = {number: leaf for leaf in cone.leaves for number in self._numbers(leaf)}
        reads = {
            name: numbers.get(self.file.numbers.get(name, b""), node)
            for name, node in piece.reads.items()
        }
        return replace(piece, reads=reads)

    def _numbers(self, node: Node) -> list[bytes]:
        """The numbers (`OnnxFile.numbers`) of the file's tensors that have the value of `node`."""
        return [self.file.numbers[name] for name in self._names.get(node, ())]

    def _in_blocks(self, name: str) -> bool:
        """Whether the tensor `name` has the channels of its node in blocks."""
        return self._same(name) in self._blocked

    def key(self, module: GraphModule, part: Part, leaves: Mapping[Node, Tensor]) -> bytes:
        """A number for the comparison of a part. Equal comparisons have equal numbers."""
        known = {
            leaf: hashed(repr((index, value.dtype, tuple(value.shape))).encode())
            for index, (leaf, value) in enumerate(leaves.items())
        }
        read = {
            name: known[leaf] + (b"blocked" if self._in_blocks(name) else b"")
            for name, leaf in part.piece.reads.items()
        }
        blocked = b"blocked" if self._in_blocks(part.piece.output) else b""
        return hashed(self.file.key(part.piece, read), blocked, cone_key(module, part.cone, known))

    def run(self, piece: Piece, leaves: Mapping[Node, Tensor], batch: int) -> Tensor:
        """Compute the value of a piece in the runtime from the values that it reads."""
        block = BLOCK.get(self.form or "", 1)
        values = {}
        for name, leaf in piece.reads.items():
            value = leaves[leaf].contiguous().numpy()
            values[name] = in_blocks(value, block) if self._in_blocks(name) else value
        result = self.file.run(piece, values, batch)
        if self._in_blocks(piece.output):
            result = out_of_blocks(result, block)
        return torch.from_numpy(result)


def leaves_of(part: Part) -> list[Node]:
    """The nodes whose values `part` reads, either in its piece or in its operators in float64."""
    return list(dict.fromkeys((*part.cone.leaves, *part.piece.reads.values())))


class FullBatch:
    """The number of samples in a full batch, and the shapes of the traced graph for this number.

    To get a full batch, the samples of each value are repeated along their axis. A piece and the
    operators in float64 may read the same value in two shapes. After the repetition, both shapes
    must contain the same numbers. If samples share an axis with another quantity, the numbers would
    differ: in (1, C * N, H, W), the repetition would mix samples and channels. So a value is read
    only if its samples have their own axis.

    Attributes:
        samples: The number of samples.
    """

    def __init__(
        self, samples: int, batch: int, shapes: Callable[[int], Mapping[Node, torch.Size]]
    ) -> None:
        """Take the numbers of samples in a full and in the compared batch.

        Args:
            samples: The number of samples in a full batch.
            batch: The number of samples in the compared batch.
            shapes: Returns the shapes of all tensors of the traced graph for a number of samples.
        """
        self.samples = samples
        self._batch, self._shapes_for = batch, shapes

    @cached_property
    def shapes(self) -> Mapping[Node, torch.Size]:
        """The shapes of all tensors of the traced graph for a full batch."""
        return self._shapes_for(self.samples)

    @cached_property
    def _compared(self) -> Mapping[Node, torch.Size]:
        return self._shapes_for(self._batch)

    def has_samples_apart(self, node: Node) -> bool:
        """Whether the samples in the value of `node` have their own axis.

        Also true if the value has no samples.
        """
        if node not in self.shapes:
            return True
        sizes = zip(self._compared[node], self.shapes[node], strict=True)
        return all(few == many or few == self._batch for few, many in sizes)


class OnnxComparison:
    """Compares the pieces of the files of one graph.

    Pass `judge` and `also_read` to `LazyOutputs.run`.

    Attributes:
        also_read: For each node, the nodes whose values a comparison reads.
    """

    def __init__(
        self,
        comparison: Comparison,
        files: Sequence[ComparedFile],
        module: GraphModule,
        batch: int,
        full: FullBatch,
        compared: set[bytes],
    ) -> None:
        """Take the files of a graph.

        Args:
            comparison: Compares each piece.
            files: The files.
            module: The traced graph.
            batch: The number of samples in its inputs.
            full: A full batch. Pieces that compute it in another way are compared for it as well.
            compared: The keys of pieces that are known to be right; new ones are added.
        """
        self._comparison, self._files, self._module = comparison, files, module
        self._batch, self._full, self._compared = batch, full, compared
        self.also_read: dict[Node, set[Node]] = {}
        for file in files:
            for node, parts in file.parts.items():
                self.also_read.setdefault(node, set()).update(*map(leaves_of, parts))

    def judge(self, node: Node, known: Values) -> None:
        """Compare the pieces that compute `node`."""
        for file in self._files:
            for part in file.parts.get(node, ()):
                leaves = {leaf: single(known[leaf]) for leaf in leaves_of(part)}
                self._compare(file, part, leaves, self._batch)
                if part.piece.chooses:
                    shapes = self._full.shapes
                    full = {leaf: repeated(value, shapes[leaf]) for leaf, value in leaves.items()}
                    self._compare(file, part, full, self._full.samples)

    def _compare(
        self, file: ComparedFile, part: Part, leaves: Mapping[Node, Tensor], batch: int
    ) -> None:
        """Compare a part of `file`, unless an equal part is known to be right.

        If a piece and the operators in float64 read different nodes, a good result is not
        remembered. The result depends on the values of these nodes, which may differ in another
        graph.
        """
        key = file.key(self._module, part, leaves)
        if key not in self._compared:
            actual = file.run(part.piece, leaves, batch)
            right = self._comparison.add(part.cone, leaves, actual, file.form)
            if right and set(part.piece.reads.values()) <= set(part.cone.leaves):
                self._compared.add(key)


def cone_key(module: GraphModule, cone: Cone, leaves: Mapping[Node, bytes]) -> bytes:
    """A number for the computation of `cone` from `leaves`."""
    known = dict(leaves)
    for node in cone.nodes:
        if node.op == "get_attr":
            constant = attribute(module, str(node.target))
            kind = repr((constant.dtype, tuple(constant.shape)))
            known[node] = hashed(kind.encode(), constant.numpy())
        else:
            call = map_arg((node.args, node.kwargs), lambda source: known[source])
            known[node] = hashed(str(node.target).encode(), repr(call).encode())
    return known[cone.nodes[-1]]


def repeated(value: Tensor, shape: torch.Size) -> Tensor:
    """Repeat the samples of `value`, so that it gets this shape."""
    for axis, size in enumerate(shape):
        if value.shape[axis] != size:
            value = value.index_select(axis, torch.arange(size) % value.shape[axis])
    return value


def single(value: Tensor) -> Tensor:
    """Convert `value` from float64 to float32. Return other values unchanged."""
    return value.float() if value.dtype == torch.float64 else value


def in_blocks(value: np.ndarray, block: int) -> np.ndarray:
    """Bring an array (N, C, H, W) into the order of (N, C / block, H, W, block)."""
    n, channels, *sizes = value.shape
    apart = value.reshape(n, channels // block, block, *sizes)
    return np.ascontiguousarray(np.moveaxis(apart, 2, -1)).reshape(value.shape)


def out_of_blocks(value: np.ndarray, block: int) -> np.ndarray:
    """The inverse of `in_blocks`."""
    n, channels, *sizes = value.shape
    apart = value.reshape(n, channels // block, *sizes, block)
    return np.ascontiguousarray(np.moveaxis(apart, -1, 2)).reshape(value.shape)
