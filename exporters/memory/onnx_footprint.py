"""Computes the peak memory of one run of an ONNX graph in the agent, without running it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import onnx
import onnx_ir as ir
from onnx import ModelProto, TensorProto

from device_agent.runtime.onnx_runtime import LARGEST_FOLDED
from exporters.memory.liveness import Buffer, model_liveness
from exporters.memory.onnx_arena import arena_bytes
from exporters.memory.static_shapes import at_batch
from profiles.cost_model.memory_rule import ONNX, run_growth


@dataclass(frozen=True)
class Footprint:
    """The peak memory of one run, in bytes, by three definitions.

    Attributes:
        planned: Planned tensors: the largest total size of tensors that are alive at the same time,
            including inputs and constants.
        arena: The runtime arena for the tensors that the runtime makes, including gaps but without
            outputs.
        process: Process peak above the idle agent: arena, inputs, outputs, constants and session.
        alive: The buffers alive at the planned peak, largest first.
    """

    planned: int
    arena: int
    process: int
    alive: tuple[Buffer, ...]


Rewrite = Callable[[ir.Model], object]
"""Changes a model whose tensors all have known shapes."""


@dataclass(frozen=True)
class SizedGraph:
    """A serialized ONNX graph at one batch size.

    The shapes of its tensors are inferred once, at the first use. The footprints of the graph and
    of its other forms use these shapes.
    """

    graph: bytes = field(repr=False)
    batch: int

    @cached_property
    def opened(self) -> ModelProto:
        """The graph in the form that a session opens, for any batch."""
        return as_opened(onnx.load_from_string(self.graph))

    @cached_property
    def shaped(self) -> ModelProto:
        """The graph with all shapes that can be inferred for this batch size."""
        return ir.to_proto(at_batch(self.opened, self.batch))

    def model(self) -> ir.Model:
        """Return a copy of the graph with shapes. The caller may change the copy."""
        return ir.from_proto(self.shaped)

    @property
    def folded(self) -> int:
        """How many nodes the runtime folds into constants when it opens the graph."""
        return len(self.opened.graph.node) - len(self.shaped.graph.node)

    def footprint(self, rewrite: Rewrite | None = None) -> Footprint:
        """Predict the memory that the graph needs on one thread.

        The agent owns the arrays of inputs and outputs. If the new value of a state cannot be
        written over the old value, both values are in memory during a run. `process` of the result
        is computed by the rule in `profiles.cost_model.memory_rule`.

        Args:
            rewrite: Changes the graph in the way in which the agent changes it before a run.

        Raises:
            ExportError: The size of a tensor cannot be computed from the batch size.
        """
        runs = self.model()
        if rewrite is not None:
            rewrite(runs)
        liveness = model_liveness(runs)
        # The agent provides the memory of outputs, so they are not in the arena.
        outputs = {value.name for value in self.opened.graph.output}
        arena = arena_bytes(buffer for buffer in liveness.buffers if buffer.name not in outputs)
        constants = sum(len(tensor.raw_data) for tensor in self.opened.graph.initializer)
        given = liveness.inputs + constants
        nodes = self.folded + len(runs.graph)
        return Footprint(
            planned=given + liveness.planned,
            arena=arena,
            process=run_growth(ONNX, given, liveness.outputs, arena, nodes),
            alive=liveness.at_peak(),
        )


def footprint(graph: bytes, batch: int) -> Footprint:
    """Predict the memory of a serialized graph for `batch` samples; see `SizedGraph.footprint`."""
    return SizedGraph(graph, batch).footprint()


def is_folded(shape: tuple[int, ...]) -> bool:
    """Whether a session keeps an 8-bit weight of `shape` as a float32 constant.

    If so, the session computes the constant when it opens the graph.
    """
    return 4 * math.prod(shape) <= LARGEST_FOLDED


def as_opened(model: ModelProto) -> ModelProto:
    """Return `model` in the form that a session opens: 8-bit weights are float32 constants.

    `exporters/int8_scales.py` describes weights as products Cast(integers) * scale. Here each such
    product becomes a constant, which has the correct size but contains only zeros.
    """
    integers = {t.name: t for t in model.graph.initializer if t.data_type == TensorProto.INT8}
    casts = {n.output[0]: n for n in model.graph.node if n.op_type == "Cast"}
    weights = {}
    for node in model.graph.node:
        cast = casts.get(node.input[0]) if node.op_type == "Mul" else None
        if cast is not None and cast.input[0] in integers:
            weights[node.output[0]] = (cast, node)
    if not weights:
        return model
    opened = ModelProto()
    opened.CopyFrom(model)
    graph = opened.graph
    gone = {name for cast, product in weights.values() for name in (*cast.input, *product.input)}
    nodes = [n for n in graph.node if n.output[0] not in gone | weights.keys()]
    tensors = [tensor for tensor in graph.initializer if tensor.name not in gone]
    for name, (cast, _) in weights.items():
        shape = integers[cast.input[0]].dims
        zeros = bytes(4 * math.prod(shape))
        tensors.append(
            TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, raw_data=zeros)
        )
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(tensors)
    return opened
