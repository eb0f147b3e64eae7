"""Computes when each tensor of an ONNX graph is in memory (alive), to predict the peak memory.

Execution order, buffers and their reuse follow the CPU provider of ONNX Runtime. An output gets its
own buffer, unless the operator is a view or may overwrite its input. A buffer becomes free when the
last node that reads it has run. Sizes are in bytes. Positions count nodes in execution order, from
0.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import onnx
import onnx_ir as ir
from onnx import ModelProto
from onnx_ir import Graph, Model, Node, Value

from exporters.memory.static_shapes import at_batch, count_of, shape_of, size_of

VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
"""Operators whose output uses the buffer of their first input."""
IN_PLACE = {
    *("Relu", "Sigmoid", "Tanh", "Elu", "LeakyRelu", "Selu", "Softplus", "Softsign"),
    *("HardSigmoid", "ThresholdedRelu", "Clip", "Cast", "CastLike", "Softmax", "LogSoftmax"),
}
"""Operators that overwrite their first input if no other node reads it. Arithmetic operators, such
as Add, never overwrite an input."""
PRODUCTS = {"MatMul", "Gemm"}
METADATA = "in_place"
"""Key in an ONNX graph's metadata; its value lists outputs that may be written over old state."""
SEGMENT = 128 * 128
"""The smallest working buffer of a convolution, in elements."""


@dataclass(frozen=True)
class Buffer:
    """The memory of a tensor and its views, or memory that an operator needs while it runs.

    The memory is needed from the node at position `birth` up to and including the node at `death`.
    """

    name: str
    size: int
    birth: int
    death: int


@dataclass(frozen=True)
class Liveness:
    """The buffers of one run, in the order of their allocation.

    The buffers include outputs, which stay alive to the end, but not inputs. `inputs` and `outputs`
    are total sizes. Outputs that are written over inputs do not count.
    """

    buffers: tuple[Buffer, ...]
    inputs: int
    outputs: int

    @cached_property
    def timeline(self) -> list[int]:
        """The bytes that are alive while each node runs, in execution order."""
        change = [0] * (max((b.death for b in self.buffers), default=0) + 2)
        for buffer in self.buffers:
            change[buffer.birth] += buffer.size
            change[buffer.death + 1] -= buffer.size
        return list(accumulate(change[:-1]))

    @property
    def planned(self) -> int:
        """The largest number of bytes alive at the same time."""
        return max(self.timeline)

    def at_peak(self) -> tuple[Buffer, ...]:
        """The buffers alive at the first peak, largest first."""
        step = self.timeline.index(self.planned)
        alive = [b for b in self.buffers if b.birth <= step <= b.death]
        return tuple(sorted(alive, key=lambda buffer: -buffer.size))


def liveness(model: ModelProto, batch: int) -> Liveness:
    """Compute the liveness of `model`.

    Args:
        model: The model.
        batch: The batch size. Every open dimension of the inputs gets this size.

    Raises:
        ExportError: The size of a tensor cannot be computed from the batch size.
    """
    return model_liveness(at_batch(model, batch))


def model_liveness(model: Model) -> Liveness:
    """Compute the liveness of a model whose tensors all have known shapes."""
    return graph_liveness(model.graph, in_place(model.metadata_props))


def graph_liveness(graph: Graph, overwriting: Collection[str] = ()) -> Liveness:
    """Compute the liveness of a graph, or of one iteration of a loop's body.

    A loop takes as many positions as its body has nodes, because all iterations are alike. Outputs
    whose names are in `overwriting` take no additional memory.
    """
    read = {node: tuple(reads(node)) for node in graph}
    order = execution_order(graph, read)
    results = set(graph.outputs)
    inner = {value for node in order for value in node.outputs} - results
    # An operator may overwrite a buffer only if it is the last reader, so count all reads.
    unread = Counter(value for node in order for value in read[node])
    root: dict[Value, Value] = {}
    birth: dict[Value, int] = {}
    death: dict[Value, int] = {}
    work: list[Buffer] = []
    start = 0
    for node in order:
        inside, born, steps = at_work(node)
        work += [replace(b, birth=start + b.birth, death=start + b.death) for b in inside]
        end = start + steps - 1
        for value, step in zip(node.outputs, born, strict=True):
            source = buffer_shared_with(node, root)
            writable = source in inner and unread[source] == 1
            if source is not None and value not in results and (is_view(node) or writable):
                root[value] = source
                unread[source] += unread[value]
            else:
                root[value], birth[value] = value, start + step
            death[root[value]] = end
        for value in read[node]:
            holder = root.get(value, value)
            death[holder] = end
            unread[holder] -= 1
        start += steps
    last = start - 1
    buffers = [
        Buffer(value.name or "", size_of(value), first, last if value in results else death[value])
        for value, first in birth.items()
        if value.name not in overwriting or value not in results
    ]
    return Liveness(
        buffers=tuple(sorted([*buffers, *work], key=lambda buffer: buffer.birth)),
        inputs=sum(map(size_of, graph.inputs)),
        outputs=sum(size_of(value) for value in graph.outputs if value.name not in overwriting),
    )


def at_work(node: Node) -> tuple[list[Buffer], list[int], int]:
    """Return three things: buffers that `node` needs while it runs, births of outputs, and steps.

    A birth is the position at which an output's buffer is first needed, counted from the node.
    Steps are the number of positions of the node: one, or more for a loop.
    """
    if node.op_type != "Scan":
        space = [Buffer(f"{node.op_type} at work", size, 0, 0) for size in working_space(node)]
        return space, [0] * len(node.outputs), 1
    body = node.attributes["body"].as_graph()
    liveness = graph_liveness(body)
    steps = len(liveness.timeline)
    born = {buffer.name: buffer.birth for buffer in liveness.buffers}
    results = [value.name or "" for value in body.outputs]
    states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    # Iterations write the carried state to two buffers in turn; the last writes to the output.
    carried = [
        Buffer(name, size_of(value), 0, steps - 1)
        for name, value in zip(results, body.outputs[:states], strict=False)
        for _ in range(2)
    ]
    inside = [buffer for buffer in liveness.buffers if buffer.name not in results]
    return [*carried, *inside], [0] * states + [born[r] for r in results[states:]], steps


def execution_order(
    graph: Graph, read: Mapping[Node, Collection[Value]] | None = None
) -> list[Node]:
    """The nodes of `graph` in the order in which ONNX Runtime runs them.

    `read` maps each node to the values that it reads; by default, `reads` finds them.

    The order comes from a depth-first search that starts at the final nodes, from the last to the
    first. If several nodes produce the inputs of a node, the search first visits the last of them
    in the file.
    """
    # ONNX Runtime turns Constant nodes into initializers before it orders the other nodes.
    read = read or {node: tuple(reads(node)) for node in graph}
    nodes = [node for node in graph if node.op_type != "Constant"]
    number = {node: n for n, node in enumerate(nodes)}
    ahead = {
        node: sorted({number[p] for v in read[node] if (p := v.producer()) in number})
        for node in nodes
    }
    used = {n for numbers in ahead.values() for n in numbers}
    waiting = [(n, False) for n in range(len(nodes)) if n not in used]
    order: list[Node] = []
    seen = set()
    while waiting:
        index, ready = waiting.pop()
        if ready:
            order.append(nodes[index])
        elif index not in seen:
            seen.add(index)
            waiting.append((index, True))
            waiting += [(n, False) for n in ahead[nodes[index]] if n not in seen]
    return order


def bodies(node: Node) -> Iterator[Graph]:
    """The graphs inside `node`, such as the body of a loop."""
    for attribute in node.attributes.values():  # Scan and Loop have one graph, If has two
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()


def reads(node: Node) -> Iterator[Value]:
    """Yield the values that `node` reads.

    If `node` has bodies (of a loop or a branch), this includes outside values that the bodies read.
    """
    yield from (value for value in node.inputs if value is not None)
    for body in bodies(node):
        inside = {*body.inputs, *(value for n in body for value in n.outputs)}
        yield from (value for n in body for value in reads(n) if value not in inside)


def buffer_shared_with(node: Node, root: Mapping[Value, Value]) -> Value | None:
    """Return the value whose buffer the output of `node` may use, or None.

    `root` maps each value to the value that owns its buffer.
    """
    if not is_view(node) and node.op_type not in IN_PLACE:
        return None
    first = node.inputs[0]
    assert first is not None
    same = size_of(node.outputs[0]) == size_of(first)
    return root.get(first, first) if same else None


def is_view(node: Node) -> bool:
    """Whether the output of `node` is a view of its first input."""
    if node.op_type != "Transpose":
        return node.op_type in VIEWS
    # ONNX Runtime removes a transposition before a product and reads the matrix by columns.
    axes = list(node.attributes["perm"].as_ints())
    rank = len(axes)
    return axes == [*range(rank - 2), *range(rank)[:-3:-1]] and all(
        use.op_type in PRODUCTS and use.graph is node.graph for use in node.outputs[0].consumers()
    )


def working_space(node: Node) -> Iterator[int]:
    """Yield the size of each buffer that ONNX Runtime's kernel for `node` needs on one thread."""
    match node.op_type:
        # Blocked kernels read images in place. The runtime uses them also for constant weights.
        case "Conv" if not node.domain and not is_constant(node.inputs[1]):
            yield 4 * unfolded(*map(shape_of, (*node.inputs[:2], node.outputs[0])))
        case "ConvTranspose":
            image = math.prod(shape_of(node.inputs[0])[2:])
            yield 4 * image * math.prod(shape_of(node.inputs[1])[1:])
        case "Where":
            # The kernel first writes each choice to a buffer, with zeros for the other choice.
            condition, *choices = node.inputs
            yield from (max(size_of(choice), 4 * count_of(condition)) for choice in choices)
        case "Loop" | "If":
            yield from (graph_liveness(body).planned for body in bodies(node))


def is_constant(value: Value | None) -> bool:
    """Whether `value` is a constant of the graph."""
    return value is not None and value.is_initializer()


def unfolded(image: Sequence[int], kernel: Sequence[int], output: Sequence[int]) -> int:
    """Number of elements of the buffer into which a convolution copies the windows of an image.

    `image`: (batch, n, *size), `kernel`: (m, n / groups, *size), `output`: (batch, m, *size).
    """
    batch, filters = output[:2]
    groups = image[1] // kernel[1]
    filters, pixels, rows = filters // groups, math.prod(output[2:]), math.prod(kernel[1:])
    if math.prod(kernel[2:]) == 1 and image[2:] == output[2:]:
        return 0
    if filters > pixels:
        return pixels * rows
    return SEGMENT if batch == groups == 1 else max(pixels * rows, pixels * filters, SEGMENT)


def note_in_place(model: ModelProto, outputs: Sequence[str]) -> None:
    """Store in the metadata of `model` that `outputs` may be written over their old state."""
    if outputs:
        model.metadata_props.add(key=METADATA, value=json.dumps(list(outputs)))


def in_place(metadata: Mapping[str, str]) -> frozenset[str]:
    """Read from a model's metadata the names of outputs that may be written over old state."""
    return frozenset(json.loads(metadata.get(METADATA, "[]")))


def in_place_of(graph: bytes) -> tuple[str, ...]:
    """The names that `in_place` reads from the metadata of a serialized graph, sorted."""
    entries = onnx.load_from_string(graph).metadata_props
    return tuple(sorted(in_place({entry.key: entry.value for entry in entries})))
