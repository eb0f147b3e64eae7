"""The peak memory of one run of a TFLite subgraph in the device agent, from the graph alone."""

from collections.abc import Iterable
from functools import cache
from math import prod

import numpy as np
import sympy
from ai_edge_litert import schema_py_generated as schema

from exporters.memory.liveness import Buffer, Liveness
from exporters.memory.onnx_footprint import Footprint
from exporters.tflite.flatbuffer import Size, Subgraph
from profiles.cost_model.memory_rule import LITERT, run_growth

WIDTHS = {
    schema.TensorType.FLOAT32: 4,
    schema.TensorType.INT64: 8,
    schema.TensorType.INT32: 4,
    schema.TensorType.BOOL: 1,
}


def footprint(subgraph: Subgraph, operators: int, batch: int) -> Footprint:
    """The memory that `subgraph` needs for batches of `batch` samples, on one thread.

    `operators` counts those of the whole file, because a session keeps all of them.
    `profiles.cost_model.memory_rule` states the rule for `process`.
    """
    sizes = tensor_sizes(subgraph, batch)
    end = len(subgraph.operators)
    births = {i: place for place, (_, o) in enumerate(subgraph.operators) for i in o.outputs}
    between = buffers(subgraph, sizes, batch)
    returned = [
        Buffer(name, sizes[tensor.index], births[tensor.index], end)
        for name, tensor in subgraph.outputs.items()
    ]
    inputs = sum(sizes[tensor.index] for tensor in subgraph.inputs.values())
    found = Liveness((*between, *returned), inputs, sum(buffer.size for buffer in returned))
    arena = arena_bytes(between)
    return Footprint(
        planned=inputs + found.planned,
        arena=arena,
        process=run_growth(LITERT, inputs, found.outputs, arena, operators),
        alive=found.at_peak(),
    )


def buffers(subgraph: Subgraph, sizes: list[int], batch: int) -> list[Buffer]:
    """The tensors between inputs and outputs, and what each call takes while it runs."""
    last = {i: place for place, (_, o) in enumerate(subgraph.operators) for i in o.inputs}
    outputs = {tensor.index for tensor in subgraph.outputs.values()}
    parts = {id(part): part for _, part in subgraph.calls}
    inside = {
        key: arena_bytes(buffers(part, tensor_sizes(part, batch), batch))
        for key, part in parts.items()
    }
    calls = {id(options): inside[id(part)] for options, part in subgraph.calls}
    found = []
    for place, (_, made) in enumerate(subgraph.operators):
        for index in made.outputs:
            if index not in outputs:
                name = subgraph.tensors[index].name
                found.append(Buffer(name, sizes[index], place, last.get(index, place)))
        if id(made.builtinOptions) in calls:
            found.append(Buffer("steps", calls[id(made.builtinOptions)], place, place))
    return found


def tensor_sizes(subgraph: Subgraph, batch: int) -> list[int]:
    """The size of each tensor of `subgraph`."""

    @cache
    def elements(shape: tuple[Size, ...]) -> int:
        return prod(int(sympy.sympify(n).subs(dict.fromkeys(symbols(n), batch))) for n in shape)

    tensors = zip(subgraph.tensors, subgraph.shapes, strict=True)
    return [WIDTHS[tensor.type] * elements(shape) for tensor, shape in tensors]


def symbols(size: Size) -> set[sympy.Symbol]:
    """The batch where `size` depends on it."""
    return set() if isinstance(size, int) else size.free_symbols


def arena_bytes(buffers: Iterable[Buffer]) -> int:
    """How long the memory is into which LiteRT and XNNPACK put `buffers`.

    From the largest on, each goes into the smallest gap that holds it between those that are alive
    at the same time as it, or behind them.
    """
    placed = np.empty((0, 4), np.int64)  # offset, end, birth, death; by offset
    for buffer in sorted(buffers, key=lambda b: (-b.size, b.birth)):
        there = placed[(placed[:, 2] <= buffer.death) & (placed[:, 3] >= buffer.birth)]
        starts = np.maximum.accumulate(np.concatenate([[0], there[:, 1]]))
        gaps = there[:, 0] - starts[:-1]
        fitting = np.where(gaps >= buffer.size, gaps, np.iinfo(np.int64).max)
        best = int(fitting.argmin()) if (gaps >= buffer.size).any() else len(gaps)
        offset = int(starts[best])
        row = [offset, offset + buffer.size, buffer.birth, buffer.death]
        place = int(np.searchsorted(placed[:, 0], offset, side="right"))
        placed = np.insert(placed, place, row, axis=0)
    return int(placed[:, 1].max(initial=0))
