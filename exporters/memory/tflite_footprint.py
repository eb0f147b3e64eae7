"""The peak memory of a TFLite signature, from the sizes of its tensors and the order of its calls.

A TFLite file shows which sizes are open, but not how these sizes depend on the batch size. A memory
plan has an expression of the batch size for each size. The plan consists of numbers and words, so
the graph cache can store it.
"""

from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any

import msgspec
import numpy as np

from exporters.memory.liveness import Buffer, Liveness
from exporters.memory.onnx_footprint import Footprint
from profiles.cost_model.memory_rule import LITERT, run_growth
from profiles.errors import ExportError

Expression = Any
"""A number of elements: an integer, BATCH, or (operation, expression, ...)."""

BATCH = "batch"
OPERATIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: prod(factors),
    "Pow": lambda base, exponent: base**exponent,
    "Rational": Fraction,
    "FloorDiv": lambda value, divisor: value // divisor,
    "Mod": lambda value, divisor: value % divisor,
    "PythonMod": lambda value, divisor: value % divisor,
    "Max": max,
    "Min": min,
}
"""Sympy's and torch's operations on sizes, by the names of their classes."""


class PlannedTensor(msgspec.Struct, frozen=True):
    """A tensor: its name, bytes per element, and number of elements."""

    name: str
    width: int
    elements: Expression


class PlannedCall(msgspec.Struct, frozen=True):
    """An operator: the indices of the tensors that it reads and writes.

    If the operator runs a subgraph, `part` is the index of this subgraph in the plan's `parts`.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    part: int | None = None


class MemoryPlan(msgspec.Struct, frozen=True):
    """A subgraph's tensors, its operators in order of execution, and the subgraphs that they run.

    `inputs` and `outputs` are indices of tensors. `file_operators` counts the operators of the
    whole file, because the session has all of them in memory. `over` maps the name of each output
    that the agent copies over an input to the index of the output's tensor.
    """

    tensors: tuple[PlannedTensor, ...]
    operators: tuple[PlannedCall, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parts: tuple["MemoryPlan", ...] = ()
    file_operators: int = 0
    over: dict[str, int] = {}


def footprint(plan: MemoryPlan, batch: int) -> Footprint:
    """Predict the memory of one run on one thread.

    `process` of the result is computed by the rule in `profiles.cost_model.memory_rule`.

    Args:
        plan: The memory plan of the signature.
        batch: Number of samples.
    """
    sizes = tensor_sizes(plan, batch)
    end = len(plan.operators)
    births = {i: step for step, call in enumerate(plan.operators) for i in call.outputs}
    between = buffers(plan, sizes, batch)
    returned = [Buffer(plan.tensors[i].name, sizes[i], births[i], end) for i in plan.outputs]
    inputs = sum(sizes[i] for i in plan.inputs)
    liveness = Liveness((*between, *returned), inputs, sum(buffer.size for buffer in returned))
    arena = arena_bytes(between)
    return Footprint(
        planned=inputs + liveness.planned,
        arena=arena,
        process=run_growth(
            LITERT,
            inputs,
            liveness.outputs,
            arena,
            plan.file_operators,
            over=sum(sizes[i] for i in plan.over.values()),
        ),
        alive=liveness.at_peak(),
    )


def buffers(plan: MemoryPlan, sizes: list[int], batch: int) -> list[Buffer]:
    """The tensors between inputs and outputs, and the memory of each called subgraph."""
    last = {i: step for step, call in enumerate(plan.operators) for i in call.inputs}
    outputs = set(plan.outputs)
    inside = [arena_bytes(buffers(p, tensor_sizes(p, batch), batch)) for p in plan.parts]
    needed = []
    for step, call in enumerate(plan.operators):
        for index in call.outputs:
            if index not in outputs:
                name = plan.tensors[index].name
                needed.append(Buffer(name, sizes[index], step, last.get(index, step)))
        if call.part is not None:
            needed.append(Buffer("steps", inside[call.part], step, step))
    return needed


def tensor_sizes(plan: MemoryPlan, batch: int) -> list[int]:
    """The size of each tensor of `plan`, in bytes."""

    @cache
    def elements(expression: Expression) -> int:
        return int(evaluate(expression, batch))

    return [tensor.width * elements(hashable(tensor.elements)) for tensor in plan.tensors]


def hashable(expression: Expression) -> Expression:
    """Replace the lists in `expression`, which comes from a stored plan, by tuples."""
    return tuple(map(hashable, expression)) if isinstance(expression, list) else expression


def evaluate(expression: Expression, batch: int) -> Any:
    """The value of `expression` for `batch`. Raises ExportError for an unknown operation."""
    if expression == BATCH:
        return batch
    if isinstance(expression, int):
        return expression
    operation, *arguments = expression
    if operation not in OPERATIONS:
        raise ExportError(
            "The memory of the TFLite graph cannot be predicted: the size of a tensor is computed "
            "from the batch size with {operation}, which is not supported. To get a prediction, "
            "export with --format onnx.",
            code="export.unpredictable-memory",
            operation=operation,
        )
    return OPERATIONS[operation](*(evaluate(argument, batch) for argument in arguments))


def arena_bytes(buffers: Iterable[Buffer]) -> int:
    """The size of the memory into which LiteRT and XNNPACK put `buffers`, in bytes.

    Both libraries place the largest buffer first. Each buffer goes into the smallest sufficient gap
    between the buffers that are alive at the same time. If there is no such gap, the buffer goes
    behind all other buffers.
    """
    # Rows (offset, end, birth, death), sorted by offset, so that gaps lie between neighbours.
    placed = np.empty((0, 4), np.int64)
    for buffer in sorted(buffers, key=lambda b: (-b.size, b.birth)):
        alive = placed[(placed[:, 2] <= buffer.death) & (placed[:, 3] >= buffer.birth)]
        starts = np.maximum.accumulate(np.concatenate([[0], alive[:, 1]]))
        gaps = alive[:, 0] - starts[:-1]
        fitting = np.where(gaps >= buffer.size, gaps, np.iinfo(np.int64).max)
        best = int(fitting.argmin()) if (gaps >= buffer.size).any() else len(gaps)
        offset = int(starts[best])
        row = [offset, offset + buffer.size, buffer.birth, buffer.death]
        index = int(np.searchsorted(placed[:, 0], offset, side="right"))
        placed = np.insert(placed, index, row, axis=0)
    return int(placed[:, 1].max(initial=0))
