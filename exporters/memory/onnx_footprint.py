"""The peak memory of one run of a graph in the device agent, from the graph alone."""

from dataclasses import dataclass

import onnx

from exporters.memory.arena import arena_bytes
from exporters.memory.liveness import Buffer, liveness
from profiles.cost_model.memory_rule import ONNX, run_growth


@dataclass(frozen=True)
class Footprint:
    """Three figures, bytes; each holds what the one before it leaves out.

    `planned`: tensors alive at once, inputs and constants included. `arena`: what the runtime's
    arena takes for those that it makes itself, gaps included, outputs not. `process`: growth of the
    process above its idle state, arena, inputs, outputs, constants and session together. `alive`
    are the buffers at the planned peak, largest first.
    """

    planned: int
    arena: int
    process: int
    alive: tuple[Buffer, ...]


def footprint(graph: bytes, batch: int) -> Footprint:
    """The memory that a serialized ONNX graph needs for batches of `batch` samples, on one thread.

    The agent owns the arrays of inputs and outputs, so the state is in memory twice during a run.
    `profiles.cost_model.memory_rule` states the rule for `process`.

    Raises ExportError where a tensor's size does not follow from the batch.
    """
    model = onnx.load_from_string(graph)
    found = liveness(model, batch)
    outputs = {value.name for value in model.graph.output}
    arena = arena_bytes(buffer for buffer in found.buffers if buffer.name not in outputs)
    given = found.inputs + sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    return Footprint(
        planned=given + found.planned,
        arena=arena,
        process=run_growth(ONNX, given, found.outputs, arena, len(model.graph.node)),
        alive=found.at_peak(),
    )
