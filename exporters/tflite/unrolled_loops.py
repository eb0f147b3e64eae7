"""Writes loops over time in the form that is fastest in LiteRT: calls of several steps each.

In every pass, a WHILE copies all its tensors, including the outputs of all steps. A call works on
the tensors of its caller without a copy. So here each step reads and writes separate tensors. These
tensors are packed into one tensor only if an operator other than a loop reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from exporters.programs.loop_bodies import Body, scan
from exporters.tflite.flatbuffer import Subgraph, Tensor, open_size
from exporters.tflite.lowering import Lowering, LoweringRules, lower
from exporters.tflite.tensor_layouts import Value
from profiles.errors import ExportError

STEPS = 8
"""Steps per call. Fewer steps need more calls; more steps make the file longer and not faster."""

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Part:
    """A subgraph of several steps. Its inputs are states, the inputs of each step, and constants.

    `states` are the indices of the last states, and `rows` are the indices of each step's outputs.
    Both are indices in a list that has the subgraph's outputs first, then its inputs, because a
    step may return one of its inputs.
    """

    graph: Subgraph
    states: list[int]
    rows: list[list[int]]

    def call(self, graph: Subgraph, inputs: Tensors) -> tuple[list[Tensor], list[Tensors]]:
        """Call the part in `graph`. Return the last states and the outputs of each step."""
        results = [*graph.call(self.graph, inputs), *inputs]
        return [results[n] for n in self.states], [[results[n] for n in row] for row in self.rows]


def loop(
    lowering: Lowering,
    body: Body,
    states: Sequence[Value],
    inputs: Sequence[Value],
    constants: Sequence[Value],
) -> list[Value]:
    """Write one loop. Like PyTorch's `scan`, return the last states, then the outputs (T, ..)."""
    current: Tensors = [lowering.dense(value) for value in states]
    same = [lowering.dense(value) for value in constants]
    read = list(zip(*(unpack_rows(lowering, x) for x in inputs), strict=True))
    if body.backward:
        read.reverse()
    parts: dict[int, Part] = {}  # by number of steps: STEPS, or fewer at the end
    written: list[Tensors] = []
    for start in range(0, len(read), STEPS):
        rows = read[start : start + STEPS]
        if len(rows) not in parts:
            parts[len(rows)] = part_of(lowering, body, current, rows, same)
        given = [*current, *(tensor for row in rows for tensor in row), *same]
        current, outputs = parts[len(rows)].call(lowering.graph, given)
        written += outputs
    if body.backward:
        written.reverse()
    whole = [pack_rows(lowering, column) for column in zip(*written, strict=True)]
    return [Value.plain(tensor) for tensor in (*current, *whole)]


def part_of(
    outer: Lowering, body: Body, states: Tensors, rows: Sequence[Tensors], constants: Tensors
) -> Part:
    """Write a subgraph with one step for each of the `rows`.

    Its inputs have the types and shapes of `states`, `rows` and `constants`.
    """
    inner = Lowering(Subgraph("steps"), outer.forms, outer.signature)

    def inputs(like: Tensors) -> list[Value]:
        count = len(inner.graph.inputs)
        tensors = [inner.input(f"x{n}", t.dtype, t.shape) for n, t in enumerate(like, count)]
        return [Value.plain(tensor) for tensor in tensors]

    current, *read, same = [inputs(like) for like in (states, *rows, constants)]
    written = []
    for row in read:
        results = lower(inner, body.graph, [*current, *row, *same])
        current = results[: len(states)]
        written.append([inner.dense(value) for value in results[len(states) :]])
    last = [inner.dense(value) for value in current]
    given = [tensor.index for tensor in inner.graph.inputs.values()]
    # A result that is an input is not an output, because the caller already has its tensor.
    tensors = {t.index: t for row in (last, *written) for t in row if t.index not in given}
    inner.graph.outputs = {f"y{n}": tensor for n, tensor in enumerate(tensors.values())}
    indices = {index: n for n, index in enumerate((*tensors, *given))}
    where = [[indices[t.index] for t in row] for row in (last, *written)]
    return Part(inner.graph.pruned()[0], where[0], where[1:])


def unpack_rows(lowering: Lowering, value: Value) -> list[Tensor]:
    """The rows of `value` along its first axis. Each row is a tensor."""
    whole = lowering.dense(value)
    length = whole.shape[0]
    if open_size(length):
        raise ExportError(
            "Signature {signature!r} has a recurrent layer that takes the samples of a batch as "
            "its steps. TFLite graphs need a fixed number of steps, but accept any number of "
            "samples. Let the layer run along another axis (batch_first=True), or export with "
            "--format onnx.",
            code="export.loop-over-samples",
            signature=lowering.signature.name,
        )
    if whole.index not in lowering.rows:
        lowering.rows[whole.index] = lowering.graph.several(
            "UNPACK",
            [whole],
            [(whole.dtype, whole.shape[1:])] * int(length),
            "UnpackOptions",
            num=int(length),
            axis=0,
        )
    return lowering.rows[whole.index]


def pack_rows(lowering: Lowering, rows: Tensors) -> Tensor:
    """Pack `rows` along a new first axis. If a loop reads the result, it uses the rows instead."""
    whole = lowering.emit(
        "PACK",
        rows,
        (len(rows), *rows[0].shape),
        "PackOptions",
        axis=0,
        valuesCount=len(rows),
    )
    lowering.rows[whole.index] = list(rows)
    return whole


FORMS: LoweringRules = {scan: loop}
