"""Peak memory of TFLite subgraphs: small ones known by hand, and what LiteRT lays out itself."""

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")

from ai_edge_litert.interpreter import (  # type: ignore[import-not-found]
    Interpreter,
    OpResolverType,
)

from exporters.memory.liveness import Buffer
from exporters.memory.tflite_footprint import (
    arena_bytes,
    buffers,
    footprint,
    tensor_sizes,
)
from exporters.tflite.flatbuffer import Subgraph, Tensor, serialize
from exporters.tflite.subgraph_sizes import plan_of
from profiles.cost_model.memory_rule import LITERT

BATCH, WIDTH = 4, 16
SAMPLES = sympy.Symbol("s", positive=True, integer=True)


def begun(name: str) -> Subgraph:
    """A subgraph of x (s, 16)."""
    graph = Subgraph(name)
    graph.inputs["x"] = graph.tensor("float32", (SAMPLES, WIDTH), name="x")
    return graph


def joined(graph: Subgraph, a: Tensor, b: Tensor) -> Tensor:
    """a and b side by side."""
    shape = (SAMPLES, int(a.shape[1]) + int(b.shape[1]))
    return graph.operator("CONCATENATION", [a, b], "float32", shape, "ConcatenationOptions", axis=1)


def doubled(name: str, times: int) -> Subgraph:
    """y: x side by side with itself, `times` over."""
    graph = begun(name)
    tensor = graph.inputs["x"]
    for _ in range(times):
        tensor = joined(graph, tensor, tensor)
    graph.outputs["y"] = tensor
    return graph


def row(width: int) -> int:
    """Bytes of a batch whose samples have this many numbers."""
    return BATCH * width * 4


def test_a_chain_holds_two_tensors_and_its_ports() -> None:
    memory = footprint(plan_of(doubled("chain", 4), 4), BATCH)
    assert memory.arena == row(64) + row(128)
    assert memory.planned == row(16) + row(128) + row(256)
    held = 2 * (row(16) + row(256))
    assert memory.process == held + memory.arena + LITERT.session_bytes + 4 * LITERT.node_bytes
    assert [buffer.size for buffer in memory.alive] == [row(256), row(128)]


def test_outputs_copied_over_inputs_are_held_once_less() -> None:
    graph = doubled("chain", 4)
    apart, over = footprint(plan_of(graph, 4), BATCH), footprint(plan_of(graph, 4, ["y"]), BATCH)
    assert apart.process - over.process == row(256)
    assert (over.planned, over.arena) == (apart.planned, apart.arena)


def test_a_call_takes_its_own_tensors_while_it_runs() -> None:
    graph, part = begun("calls"), doubled("part", 2)
    (once,) = graph.call(part, [graph.inputs["x"]])
    graph.outputs["y"] = joined(graph, once, once)
    assert footprint(plan_of(graph, 4), BATCH).arena == row(64) + row(32)


@given(st.data())
def test_the_arena_is_as_long_as_litert_makes_it(data: st.DataObject) -> None:
    """Tensors of any two before them, so that their sizes and times differ."""
    graph = begun("random")
    tensors = [graph.inputs["x"]]
    for _ in range(data.draw(st.integers(2, 9))):
        a, b = (data.draw(st.sampled_from(tensors[-4:])) for _ in range(2))
        tensors.append(joined(graph, a, b))
    graph.outputs["y"] = tensors[-1]
    graph, _ = graph.pruned()
    plan = plan_of(graph)
    between = buffers(plan, tensor_sizes(plan, BATCH), BATCH)
    end = len(graph.operators)
    size = row(int(tensors[-1].shape[1]))
    assert arena_bytes([*between, Buffer("y", size, end - 1, end)]) == laid_out(graph)


def laid_out(graph: Subgraph) -> int:
    """From the input's end to the last byte of all tensors, where LiteRT's own kernels run."""
    interpreter = Interpreter(
        model_content=serialize({graph.name: graph}),
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    interpreter.resize_tensor_input(0, [BATCH, WIDTH])
    interpreter.allocate_tensors()
    views = [interpreter.tensor(n)() for n in range(len(graph.tensors))]
    ends = [view.__array_interface__["data"][0] + view.nbytes for view in views]
    return int(np.max(ends)) - ends[0]
