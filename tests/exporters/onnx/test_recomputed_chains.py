"""Random chains of nodes: what is computed again never changes a result and never costs memory."""

import numpy as np
import onnx_ir as ir
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, helper

import onnx_graphs
from device_agent.formats.manifest import Port
from device_agent.runtime.onnx_runtime import open_model
from exporters.memory.liveness import liveness
from exporters.memory.onnx_footprint import footprint
from exporters.onnx.recomputed.cheap_activations import RecomputeActivations
from exporters.onnx.recomputed.checkpoints import KeepCheckpoints, Search
from exporters.onnx.recomputed.forward_pass import ForwardPass, repeat
from exporters.programs.program import ProgramSignature, Recomputation
from onnx_graphs import value
from profiles.cost_model.memory_rule import ONNX

BATCH = 32

Node = tuple[str, list[int]]
"""An operator and the numbers of the values that it reads; 0 is the input."""


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Node], list[int]]:
    """Nodes of a forward pass, and which of their results the backward pass reads, last first."""
    count = draw(st.integers(4, 14))
    nodes = []
    for number in range(count):
        last = st.just(number)
        before = st.integers(max(0, number - 3), number)
        kind = draw(st.sampled_from(["Sin", "Sin", "Relu", "Exp", "Add", "Mul"]))
        nodes.append((kind, [draw(last), *([draw(before)] if kind in ("Add", "Mul") else [])]))
    read = draw(st.lists(st.integers(0, count), min_size=2, max_size=count, unique=True))
    return nodes, sorted(read, reverse=True)


ROW, LONG_ROW = 500, 50_000


def chain_model(nodes: list[Node], read: list[int], row: int = ROW) -> ModelProto:
    """x -> the sum of the last value as the loss, then the product of it with all that are read."""
    parts = [
        helper.make_node(kind, [f"v{n}" for n in inputs], [f"v{number}"])
        for number, (kind, inputs) in enumerate(nodes, 1)
    ]
    last = f"v{len(nodes)}"
    parts += [
        helper.make_node("ReduceMean", [last], ["loss"], keepdims=0),
        helper.make_node("Mul", ["loss", last], ["g0"]),
    ]
    for number, read_value in enumerate(read):
        parts += [
            helper.make_node("Mul", [f"g{number}", f"v{read_value}"], [f"h{number}"]),
            helper.make_node("Tanh", [f"h{number}"], [f"g{number + 1}"]),
        ]
    outputs = [value("loss", ()), value(f"g{len(read)}", ("n", row))]
    return onnx_graphs.model(parts, [value("v0", ("n", row))], outputs)


def chain_signature(model: ModelProto) -> ProgramSignature:
    x, (loss, result) = model.graph.input[0], model.graph.output
    row = x.type.tensor_type.shape.dim[1].dim_value
    return ProgramSignature(
        name="step",
        inputs=(Port(name=x.name, kind="samples", dtype="float32", shape=(None, row)),),
        outputs=(
            Port(name=loss.name, kind="metric", dtype="float32", shape=()),
            Port(name=result.name, kind="samples", dtype="float32", shape=(None, row)),
        ),
        function=dict,
        recompute=Recomputation(BATCH),
    )


@settings(max_examples=60, deadline=None)
@given(chain=chains(), values=st.integers(0, 2**31 - 1))
# As many planned bytes, but two nodes less: one Sin runs again in place of three ReLUs.
@example(chain=([("Sin", [0]), ("Relu", [1]), ("Relu", [2]), ("Relu", [3])], [1, 0]), values=0)
def test_any_chain_has_the_same_results_and_no_higher_peak(
    chain: tuple[list[Node], list[int]], values: int
) -> None:
    model = chain_model(*chain)
    plain, again = ir.from_proto(model), ir.from_proto(model)
    changed = KeepCheckpoints(chain_signature(model), Recomputation(BATCH))(again).modified
    for graph in (plain, again):
        RecomputeActivations("loss")(graph)
    planned = [liveness(ir.to_proto(graph), BATCH).planned for graph in (plain, again)]
    nodes = [ONNX.node_bytes * graph.graph.num_nodes() for graph in (plain, again)]
    assert planned[1] <= planned[0]
    before, after = map(sum, zip(planned, nodes, strict=True))
    assert after < before if changed else after == before
    x = np.random.default_rng(values).standard_normal((2, ROW), np.float32) / 4
    runs = [
        open_model(ir.to_proto(graph).SerializeToString(), 1).run(None, {"v0": x})
        for graph in (plain, again)
    ]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(max_examples=60, deadline=None)
@given(chain=chains(), most=st.sampled_from([0.1, 0.2, 0.4]))
def test_work_that_is_done_again_stays_in_its_limit_and_saves_a_larger_share_of_memory(
    chain: tuple[list[Node], list[int]], most: float
) -> None:
    """All nodes of a chain take as long, and all values but the loss are equally large."""
    model = chain_model(*chain, row=LONG_ROW)
    again = Recomputation(BATCH, most)
    names = Search(model, chain_signature(model), again).best()
    work = len(names) / len(model.graph.node)
    assert work <= most
    plain, repeated = ir.from_proto(model), ir.from_proto(model)
    repeat(ForwardPass(repeated.graph, ["loss"]), names)
    for graph in (plain, repeated):
        RecomputeActivations("loss")(graph)
    peaks = [footprint(ir.to_proto(g).SerializeToString(), BATCH) for g in (plain, repeated)]
    process = 10 * 2**20 + peaks[0].planned
    saved = (peaks[0].planned - peaks[1].planned) / process
    assert saved > 0.98 * work if names else saved == 0
